"""The calls of scaled_dot_product_attention that a step makes, and its kernels on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.checks.attention_kernels import measured, noted
from speedkit_jupyter.optimizations.facts.attention import Call, Measured, Timed, ahead

SIZE = (2, 2, 16, 8)


def calls_of(step: Any) -> dict[Call, Any]:
    found: dict[Call, Any] = {}
    with noted(found):
        step()
    return found


def qkv(size: tuple[int, ...] = SIZE, **more: Any) -> list[torch.Tensor]:
    return [torch.rand(size, **more) for _ in range(3)]


def test_calls_of_one_kind_are_counted():
    before, (q, k, v) = F.scaled_dot_product_attention, qkv()
    found = calls_of(lambda: [F.scaled_dot_product_attention(q, k, v) for _ in range(3)])
    ((call, seen),) = found.items()
    assert call == Call(SIZE, SIZE, SIZE)
    assert seen.number == 3
    assert torch.equal(seen.tensors[0], q)
    assert F.scaled_dot_product_attention is before


def test_so_is_one_inside_of_torchs_own_attention_layer():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(2, 16, 8)
    found = calls_of(lambda: layer(x, x, x, need_weights=False))
    ((call, seen),) = found.items()
    assert (call.query, call.trains, seen.number) == ((2, 2, 16, 4), True, 1)


def test_all_that_decides_about_a_kernel_is_noted():
    (q, k, v), attention = qkv(requires_grad=True), F.scaled_dot_product_attention
    mask = torch.ones(16, 16, dtype=torch.bool)

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        F.scaled_dot_product_attention(q, k, v, None, 0.5, True, scale=0.3)
        F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            F.scaled_dot_product_attention(q, k, v)

    found = calls_of(step)
    masked, dropping, grouped, lowered = found
    assert (masked.mask, dropping.mask) == ("bool 16×16", "")
    assert (dropping.dropout, dropping.is_causal, dropping.scale) == (0.5, True, 0.3)
    assert grouped.enable_gqa
    assert [call.trains for call in found] == [True, True, True, False]
    assert lowered.dtype == "bfloat16"
    assert found[lowered].tensors[0].dtype is torch.bfloat16
    assert F.scaled_dot_product_attention is attention


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mask", [None, torch.ones(32, 32).tril().bool(), torch.ones(32, 32)])
def test_the_kernels_of_a_cpu_are_timed_side_by_side(trains, mask):
    q, k, v = qkv((2, 4, 32, 16), requires_grad=trains)
    found = calls_of(lambda: F.scaled_dot_product_attention(q, k, v, mask))
    switches, random = flags.snapshot(), torch.get_rng_state()
    (row,) = measured(found, 5.0)
    assert flags.snapshot() == switches
    assert torch.equal(torch.get_rng_state(), random)
    assert (row.own, row.calls, row.engine) == ("flash", 1, "")
    assert {one.kernel for one in row.kernels} == {"flash", "math"}
    assert row.call.trains is trains
    for one in row.kernels:
        assert one.seconds > 0
        assert one.low <= one.speedup <= one.high
    assert q.grad is None


def test_what_only_one_kernel_takes_or_there_is_no_time_for_has_no_row():
    left_out: list[Call] = []
    q, k, v = qkv()
    one = calls_of(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert list(measured(one, 5.0, left_out=left_out)) == []
    assert left_out == []
    two = calls_of(lambda: F.scaled_dot_product_attention(q, k, v))
    for seconds in (0.0, 1e-9):
        assert list(measured(two, seconds, left_out=left_out)) == []
    assert left_out == [*two, *two]


def row(speedup: float = 2.0, low: float = 1.9, calls: int = 1, **more: Any) -> Measured:
    call = Call(SIZE, SIZE, SIZE, dtype=more.pop("dtype", "float32"))
    other = Timed("math", 1 / speedup, speedup, low, speedup + 0.1)
    return Measured(call, calls, "flash", (Timed("flash", 1.0), other), **more)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], []),
        ([row()], ["math"]),
        ([row(1.1, 0.9)], []),  # not proven
        ([row(0.5, 0.4)], []),
        ([row(1.01, 1.005)], []),  # too little
        ([row(2.0, 1.9, calls=1), row(0.5, 0.4, calls=12)], []),  # loses in all
        ([row(2.0, 1.9, calls=12), row(0.5, 0.4, calls=1)], ["math"]),
        ([row(0.5, 0.4), row(1.5, 1.4, engine="onednn")], ["math"]),
        ([row(0.5, 0.4), row(1.5, 1.4, dtype="bfloat16")], ["math"]),
    ],
)
def test_only_what_is_faster_on_the_steps_own_calls_is_tried(rows, words):
    assert ahead(rows) == words
