"""What the tests share of the entries that multiply by something in the stead of weights."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups
from speedkit_jupyter.optimizations.twins import quantizing

MISSING = quantizing.obstacle(Hardware.detect(), Facts(linears=1))
real = pytest.mark.skipif(bool(MISSING), reason=MISSING)


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
