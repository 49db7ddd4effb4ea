"""The calls of scaled_dot_product_attention that a step makes, and its kernels on them."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, plan
from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.checks.attention_calls import noted
from speedkit_jupyter.measure.checks.attention_kernels import measured
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.optimizations.facts import attention as timings
from speedkit_jupyter.optimizations.facts.attention import (
    Call,
    Measured,
    Timed,
    ahead,
    chosen,
    speedups,
    taken,
)
from speedkit_jupyter.optimizations.sdpa import Sdpa
from speedkit_jupyter.report.plan_report import context_report, describe_call
from speedkit_jupyter.tuning.attention import of_step

SIZE = (2, 2, 16, 8)


def calls_of(step: Any) -> dict[Call, Any]:
    found: dict[Call, Any] = {}
    with noted(found):
        step()
    return found


def qkv(size: tuple[int, ...] = SIZE, **more: Any) -> list[torch.Tensor]:
    return [torch.rand(size, **more) for _ in range(3)]


class Model(nn.Module):
    """Two layers with one shape of attention, one with another."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for causal in (True, True, False):
            q, k, v = self.inner(x).view(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
            more = {"dropout_p": self.dropout, "is_causal": causal}
            x = x + F.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2).reshape(x.shape)
        return x


def training(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Model(dropout)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(2, 16, 8)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


# --- what is called ---


@pytest.mark.parametrize(
    "function",
    [scaled_dot_product_attention, lambda *given: F.scaled_dot_product_attention(*given)],
)
def test_a_call_is_noted_by_whatever_name_once(function):
    q, k, v = qkv()
    found = calls_of(lambda: [function(q, k, v) for _ in range(3)])
    ((call, seen),) = found.items()
    assert call == Call(SIZE, SIZE, SIZE)
    assert seen.number == 3
    assert torch.equal(seen.tensors[0], q)


def test_so_is_one_inside_of_torchs_own_attention_layer():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(2, 16, 8)
    found = calls_of(lambda: layer(x, x, x, need_weights=False))
    ((call, seen),) = found.items()
    assert (call.query, call.trains, seen.number) == ((2, 2, 16, 4), True, 1)


def test_all_that_decides_about_a_kernel_is_noted():
    q, k, v = qkv(requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool)
    found = list(
        calls_of(
            lambda: [
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                F.scaled_dot_product_attention(q, k, v, None, 0.5, True, scale=0.3),
                F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
            ]
        )
    )
    assert [call.mask for call in found] == ["bool 16×16", "", ""]
    assert (found[1].dropout, found[1].is_causal, found[1].scale) == (0.5, True, 0.3)
    assert found[2].enable_gqa
    assert all(call.trains for call in found)
    assert describe_call(found[1]) == "2×2×16×8 float32, causal, dropout 0.5, scale 0.3, training"
    assert describe_call(found[2]) == "2×2×16×8 by 2×1×16×8 float32, grouped heads, training"
    with torch.no_grad():
        (call,) = calls_of(lambda: F.scaled_dot_product_attention(q, k, v))
    assert not call.trains


def test_under_autocast_it_is_what_the_kernel_gets():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        ((call, seen),) = calls_of(lambda: F.scaled_dot_product_attention(q, k, v)).items()
    assert call.dtype == "bfloat16"
    assert seen.tensors[0].dtype is torch.bfloat16


def test_another_threads_calls_are_its_own_and_nothing_stays_behind():
    q, k, v = qkv()
    before = F.scaled_dot_product_attention

    def step() -> None:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, k, v))
        thread.start()
        thread.join()

    assert calls_of(step) == {}
    assert F.scaled_dot_product_attention is before
    with pytest.raises(ZeroDivisionError):
        calls_of(lambda: 1 / 0)
    assert F.scaled_dot_product_attention is before


# --- what each kernel takes ---


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_two_kernels_that_are_compared_with_float64(trains, mask, dtype):
    q, k, v = qkv((2, 4, 32, 16), dtype=dtype, requires_grad=trains)
    allowed = torch.ones(32, 32, dtype=torch.bool).tril()
    masks = {"none": None, "bool": allowed, "float": torch.rand(32, 32).to(dtype)}
    found = calls_of(lambda: F.scaled_dot_product_attention(q, k, v, masks[mask]))
    switches, random = flags.snapshot(), torch.get_rng_state()
    (row,) = measured(found, 5.0)
    assert flags.snapshot() == switches
    assert torch.equal(torch.get_rng_state(), random)
    assert (row.own, row.calls, row.engine) == ("flash", 1, "")
    assert {one.kernel for one in row.kernels} == {"flash", "math"}
    assert row.call.trains is trains
    most = 1e-5 if dtype is torch.float32 else 0.05
    for one in row.kernels:
        assert 0 <= one.error < most
        assert one.seconds > 0
        assert one.low <= one.speedup <= one.high
    assert q.grad is None


def test_what_only_one_kernel_takes_has_no_table():
    q, k, v = qkv()
    assert taken(q, k, v, None) == "flash"
    assert taken(q, k, v, None, dropout_p=0.5) == "math"
    assert list(measured(calls_of(training(dropout=0.5)[2]), 5.0)) == []


def test_what_there_is_no_time_for_is_left_out():
    for seconds in (0.0, 1e-9):
        left_out: list[Call] = []
        assert list(measured(calls_of(training()[2]), seconds, left_out=left_out)) == []
        assert len(left_out) == 2
    dropping: list[Call] = []
    assert list(measured(calls_of(training(dropout=0.5)[2]), 5.0, left_out=dropping)) == []
    assert dropping == []  # one kernel, nothing to compare
    assert list(measured({}, 1.0)) == []


def test_a_choice_is_in_force_in_its_block_only():
    q, k, v = qkv()
    before = flags.snapshot()
    with chosen("math"):
        assert taken(q, k, v, None) == "math"
    with chosen("auto"):
        assert flags.snapshot() == before
    with pytest.raises(ZeroDivisionError), chosen("math"):
        1 / 0  # noqa: B018
    assert flags.snapshot() == before


def test_an_empty_row_of_a_mask_is_no_error():
    q, k, v = qkv()
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    (row,) = measured(calls_of(lambda: F.scaled_dot_product_attention(q, k, v, mask)), 5.0)
    assert all(one.error < 1e-5 for one in row.kernels)


# --- what follows from it ---


def row(
    speedup: float = 2.0, low: float = 1.9, error: float = 1e-7, calls: int = 1, **more: Any
) -> Measured:
    own = Timed("flash", 1.0, error=1e-7)
    other = Timed("math", 1 / speedup, speedup, low, speedup + 0.1, error)
    call = {name: more.pop(name) for name in ("dtype", "device") if name in more}
    return Measured(Call(SIZE, SIZE, SIZE, **call), calls, "flash", (own, other), **more)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], []),
        ([row()], ["math"]),
        ([row(1.1, 0.9)], []),  # not proven
        ([row(0.5, 0.4)], []),
        ([row(1.01, 1.005)], []),  # too little
        ([row(error=1e-3)], []),  # far less exact
        ([row(2.0, 1.9, calls=1), row(0.5, 0.4, calls=12)], []),  # loses in all
        ([row(2.0, 1.9, calls=12), row(0.5, 0.4, calls=1)], ["math"]),
        ([row(0.5, 0.4), row(1.5, 1.4, engine="onednn")], ["math"]),
        ([row(0.5, 0.4), row(1.5, 1.4, dtype="bfloat16")], ["math"]),
    ],
)
def test_only_what_is_faster_on_the_steps_own_calls_is_tried(rows, words):
    assert ahead(rows) == words
    facts = Facts(attention=tuple(rows))
    assert Sdpa().candidates(Hardware.from_json("cpu"), facts) == tuple(words)
    decision = plan(SpeedConfig(), Hardware.from_json("cpu"), facts)["sdpa"]
    assert decision.worth_measuring == (words[0] if words else None)
    assert not decision.active
    assert decision.evidence == tuple(rows)
    assert ("kind" in decision.reason) is bool(rows)


def test_a_gpu_tries_every_kernel_until_its_calls_are_measured():
    facts = Facts(device="cuda:0", devices=("cuda:0",))
    h200 = Hardware.from_json("h200")
    assert Sdpa().candidates(h200, facts) == ("flash", "cudnn", "efficient")
    there = (row(device="cuda:0"),)
    assert Sdpa().candidates(h200, Facts(device="cuda:0", attention=there)) == ("math",)
    elsewhere = (row(device="cpu"),)
    facts = Facts(device="cuda:0", devices=("cuda:0",), attention=elsewhere)
    assert Sdpa().candidates(h200, facts) == ("flash", "cudnn", "efficient")


def test_the_gain_is_of_all_calls_and_what_a_kernel_does_not_take_counts_as_before():
    other = Measured(Call(SIZE, SIZE, SIZE, mask="bool"), 1, "flash", (Timed("flash", 2.0),))
    gains = speedups([row(2.0, calls=2), other], "math")
    assert gains == {("float32", ""): pytest.approx(4 / 3)}


def test_what_was_measured_is_kept_beside_the_model_and_undone(machine):
    machine("cpu")
    model, optimizer, step = training()
    before = copy.deepcopy(model.state_dict())
    rows = of_step(step_of(step), Hardware.current(), 5.0)
    assert [(row.call.is_causal, row.calls) for row in rows] == [(True, 2), (False, 1)]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert Facts.read(model).attention == rows
    found = plan(SpeedConfig(sdpa="math"), facts=Facts.read(model))["sdpa"]
    assert "measured on 2 kinds of calls that its step makes, 'math' is" in found.reason
    assert found.evidence == rows
    assert len(plan(facts=Facts.read(model)).to_dict()["sdpa"]["evidence"]) == 2
    assert Facts.read(copy.deepcopy(model)).attention == ()
    with apply_speedups(model, SpeedConfig(sdpa="math"), optimizer=optimizer)[1] as context:
        assert "flash (torch's own choice)" in repr(context_report(context))
    gone = weakref.ref(model)
    del model, optimizer, step, found, before, context
    gc.collect()
    assert gone() is None
    timings.keep(nn.Linear(1, 1), ())
