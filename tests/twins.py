"""What the tests share of the entries that multiply by something in the stead of weights."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import (
    Facts,
    Hardware,
    SpeedConfig,
    SpeedKitError,
    apply_speedups,
    code,
    plan,
)
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.plans.context import restore_all
from speedkit_jupyter.plans.planning import Plan

MISSING = quantizing.obstacle(Hardware.detect(), Facts(linears=1))
real = pytest.mark.skipif(bool(MISSING), reason=MISSING)
each_form = pytest.mark.parametrize("form", ["torch", "accelerate", "fabric", "transformers"])
# Of a torchao that can't be used, and what the decision says of it.
without_torchao = pytest.mark.parametrize(
    ("libraries", "why"),
    [({}, "pip install torchao"), ({"torchao": "0.16.0"}, "needs torchao 0.18; this is 0.16.0")],
)
SMALL = Facts(device="cuda:0", parameters=100, linears=4)
INPUTS = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """Two layers whose sizes suit all of the entries, and one that suits few."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.Linear(32, 3)).eval()


@torch.no_grad()
def answer(model: nn.Module) -> torch.Tensor:
    """What it predicts."""
    return model(INPUTS)


def with_torchao(machine: Hardware, version: str = "0.18.0", **more: Any) -> Hardware:
    """The machine with torchao installed, and with what else is other there."""
    return machine.model_copy(update={"libraries": {"torchao": version}, **more})


def needs_capability(*wanted: int) -> None:
    """Skips the test on a GPU of an older compute capability."""
    if torch.cuda.get_device_capability() < wanted:
        pytest.skip(f"needs compute capability {'.'.join(map(str, wanted))}")


def bits(model: nn.Module) -> list[tuple[Any, ...]]:
    """All of each parameter: which object, of which class, where, what lies on it, its values."""
    return [
        (id(p), type(p), p.data_ptr(), dict(p.__dict__), p.requires_grad, p.detach().clone())
        for p in model.parameters()
    ]


def assert_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> None:
    """Nothing of any parameter is another."""
    for one, other in zip(before, after, strict=True):
        assert one[:-1] == other[:-1]
        assert torch.equal(one[-1], other[-1])


@torch.no_grad()
def with_plan(
    model: nn.Module, inputs: torch.Tensor, config: SpeedConfig, said: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model gives without the plan and with it; afterwards it is as it was."""
    before, plain = bits(model), model(inputs)
    with apply_speedups(model, config.alone())[1] as context:
        assert said in str(context.changes())
        found = model(inputs)
    assert torch.equal(model(inputs), plain)
    assert_same(before, bits(model))
    return plain, found


def assert_restored_after_errors(model: nn.Module, config: SpeedConfig) -> None:
    """After an error inside the block, and after Ctrl-C."""
    before = bits(model)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), apply_speedups(model, config.alone())[1]:
            raise error
        assert_same(before, bits(model))


@torch.no_grad()
def assert_copies_are_plain(model: nn.Module, inputs: torch.Tensor, config: SpeedConfig) -> None:
    """A state_dict, a copy and a file that are made meanwhile are as without the plan."""
    plain, values = model(inputs), copy.deepcopy(model.state_dict())
    with apply_speedups(model, config.alone())[1]:
        found, copied, file = model.state_dict(), copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    assert list(found) == list(values)
    for name, value in values.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], value)
    for other in (copied, torch.load(file, weights_only=False)):
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        assert not any(p.__dict__ for p in other.parameters())
        assert torch.equal(other(inputs), plain)


@torch.no_grad()
def assert_any_order(
    make: Callable[[], tuple[nn.Module, Sequence[tuple[nn.Module, SpeedConfig]]]],
    inputs: torch.Tensor,
) -> None:
    """A model, and plans on it and on what shares a layer with it: the one of the second plan."""
    for order in itertools.permutations(range(len(make()[1]))):
        model, wishes = make()
        before, plain = bits(model), model(inputs)
        contexts = [apply_speedups(part, config.alone())[1] for part, config in wishes]
        for place in order:
            assert "_speedkit_twin" in wishes[1][0].weight.__dict__
            contexts[place].restore()
        assert_same(before, bits(model))
        assert torch.equal(model(inputs), plain)


def assert_no_rule_takes_it(name: str, machine: Hardware, facts: Facts = SMALL) -> None:
    """Nor is it offered."""
    decision = plan(SpeedConfig(), machine, facts)[name]
    assert not decision.active
    assert decision.worth_measuring is None
    assert "by request only" in decision.reason


def assert_declined(name: str, config: SpeedConfig, machine: Hardware, facts: Facts, why: str):
    """Where the model is on the device that the facts name."""
    on = config.changed("device", facts.device)
    decision = plan(on, machine, facts)[name]
    assert decision.declined
    assert not decision.active
    assert why in decision.reason


def assert_code_has(call: str, found: Plan, form: str) -> None:
    """Its code in this form is Python, with this call."""
    text = code(found, form=form)
    assert call in text
    compile(text, "code", "exec")


def assert_weights_multiply_where_gradients_are_recorded(
    make: Callable[[], nn.Module], inputs: torch.Tensor, config: SpeedConfig, name: str
) -> None:
    """They are what they would be without the plan, and a note says so."""
    model, twin = make(), make()
    with apply_speedups(model, config)[1] as context, torch.no_grad():
        model(inputs)
        assert name not in context.notes or "records gradients" not in context.notes[name]
        with torch.enable_grad():
            model(inputs).sum().backward()
        assert "records gradients" in context.notes[name]
    twin(inputs).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def assert_nothing_is_kept_alive(
    make: Callable[[], nn.Module], inputs: torch.Tensor, config: SpeedConfig
) -> None:
    """Neither by the plan nor by what it keeps."""
    model = make()
    context = apply_speedups(model, config)[1]
    with torch.no_grad():
        model(inputs)
    references = [weakref.ref(p) for p in model.parameters()]
    del model, context
    gc.collect()
    assert [one() for one in references] == [None] * len(references)
    restore_all()


def assert_unchanged_where_there_is_no_kernel(config: SpeedConfig, line: str) -> None:
    """Such an error is one line."""
    model = network()
    before = bits(model)
    with pytest.raises(SpeedKitError, match=line):
        apply_speedups(model, config)
    assert_same(before, bits(model))
