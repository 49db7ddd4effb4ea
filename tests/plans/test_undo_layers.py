"""Plans on overlapping models and shared optimizers, restored in any order; copies of models."""

from __future__ import annotations

import copy
import gc
import io
import pickle  # noqa: TID251
import threading
import weakref

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.applying import applied_to

ALL = {"threads": 1, "tf32": "medium", "channels_last": True, "sdpa": "math", "precision": "bf16"}
CONTIGUOUS = (8, 4, 2, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))


def applied(model: nn.Module, optimizer=None, **config):
    """A plan of just these."""
    config = SpeedConfig.from_dict({**config, "alone": True})
    return apply_speedups(model, config, optimizer=optimizer)[1]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 2, 4, 4)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


# --- random sequences ---


@examples(10)
@given(seed=st.integers(20_000, 2**32))
def test_no_sequence_of_plans_on_overlapping_models_leaves_a_bit(seed):
    import undo_sequences

    assert undo_sequences.play(seed)[0] == []


# --- what is new or replaced while a plan is in force ---


def test_a_layout_that_the_user_chose_meanwhile_stays():
    model = network()
    context = applied(model, channels_last=True)
    model.to(memory_format=torch.contiguous_format)
    context.restore()
    assert model[0].weight.stride() == CONTIGUOUS
    model.to(memory_format=torch.channels_last)
    with applied(model, channels_last=True):
        pass
    assert model[0].weight.stride() != CONTIGUOUS


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
        lambda m: m.half().float(),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    ],
    ids=["clone", "cast", "assign", "load"],
)
def test_weights_that_were_replaced_come_back_too(replace):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with applied(model, optimizer, channels_last=True, fused_optimizer=True):
        train(model, optimizer)
        replace(model)
        train(model, optimizer)
    assert model[0].weight.stride() == model[0].weight.grad.stride() == CONTIGUOUS


# --- optimizers that are made after apply ---


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_made_after_apply_is_fused_from_its_first_step_on(make):
    model = network()
    _, context = apply_speedups(model)
    assert "made later" in context.plan["fused_optimizer"].reason
    optimizer = make(model.parameters(), lr=0.1)
    other = make(nn.Linear(2, 2).parameters(), lr=0.1)
    before = [set(optimizer.__dict__), dict(optimizer.defaults)]
    fused = optimizer.param_groups[0]["fused"]
    train(model, optimizer, other)
    assert optimizer.param_groups[0]["fused"] is True
    assert other.param_groups[0]["fused"] is not True
    assert make.__name__ in context.notes["fused_optimizer"]
    context.restore()
    assert optimizer.param_groups[0]["fused"] is fused
    assert [set(optimizer.__dict__), dict(optimizer.defaults)] == before


# --- copies, files, lifetimes ---


def saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(io.BytesIO(saved(model)), weights_only=False),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_applied_model_has_nothing_of_ours(how):
    model = network()
    keys = [sorted(part.__dict__) for part in model.modules()]
    with applied(model, **ALL, compile=True):
        twin = COPIES[how](model)
        assert applied_to(twin) is None
        assert b"speedkit" not in saved(model)
    assert [sorted(part.__dict__) for part in twin.modules()] == keys
    assert [sorted(part.__dict__) for part in model.modules()] == keys


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_dropped_is_freed_at_once_and_its_flags_come_back(compiled):
    import torch._dynamo

    before = dict(flags.snapshot())
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model[0].weight
    apply_speedups(model, SpeedConfig(**ALL, compile=compiled), optimizer=optimizer)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        if compiled:  # the compiled call lies in the model's own __dict__
            gc.collect()
        assert gone() is None
    finally:
        gc.enable()
    assert flags.snapshot() == before
    assert weight.stride() == CONTIGUOUS
    assert optimizer.param_groups[0]["fused"] is None


# --- threads ---


def test_two_threads_that_apply_and_restore_on_one_model_leave_it_as_it_was():
    model, failures = network(), []
    before = flags.snapshot()

    def work() -> None:
        try:
            for _ in range(3):
                applied(model, threads=1, channels_last=True, sdpa="math").restore()
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    left = applied_to(model)
    if left is not None:
        left.restore()
    assert not failures
    assert applied_to(model) is None
    assert model[0].weight.stride() == CONTIGUOUS
    assert flags.diff(before, flags.snapshot()) == ()
