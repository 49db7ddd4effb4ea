"""docs/contract.md, "Plans": any order of restoring, exact flags, nothing left on the model."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, SpeedContext, apply_speedups
from speedkit_jupyter.machines import flags

PLANS: list[dict[str, Any]] = [
    {"channels_last": True, "fused_optimizer": True, "precision": "bf16"},
    {"channels_last": True, "sdpa": "math", "threads": 1},
    {"tf32": "medium", "fused_optimizer": True, "precision": "fp32"},
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))


def applied(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, Any]
) -> SpeedContext:
    config = SpeedConfig.from_dict({**plan, "alone": True})
    return apply_speedups(model, config, optimizer=optimizer)[1]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(2, 2, 4, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def form(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return everything that a plan may change, without the values that training changes."""
    return (
        flags.snapshot(),
        {name: (value.stride(), value.dtype) for name, value in model.state_dict().items()},
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        [sorted(vars(module)) for module in model.modules()],
        [type(module) for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    )


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return weights and moments as numbers."""
    state = optimizer.state_dict()["state"]
    return (
        {name: value.tolist() for name, value in model.state_dict().items()},
        {key: {name: v.tolist() for name, v in one.items()} for key, one in state.items()},
    )


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_plans_restored_in_any_order_end_at_the_beginning(order: tuple[int, ...]) -> None:
    model, part = network(), nn.Linear(3, 3)
    both = nn.Sequential(model, part)
    optimizer = torch.optim.AdamW(both.parameters(), 0.01)
    train(model, optimizer)
    before = form(both, optimizer)
    targets = [both, model, both]
    contexts = [applied(one, optimizer, plan) for one, plan in zip(targets, PLANS, strict=True)]
    assert form(both, optimizer) != before
    for index in order:
        contexts[index].restore()
    assert form(both, optimizer) == before


def test_what_was_trained_under_a_plan_is_kept() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    context = applied(model, optimizer, PLANS[0])
    train(model, optimizer)
    found = values(model, optimizer)
    context.restore()
    assert values(model, optimizer) == found


def test_the_model_is_the_same_object_throughout_and_carries_nothing_of_ours() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    keys = list(model.state_dict())
    same, context = apply_speedups(model, SpeedConfig.from_dict(PLANS[0]), optimizer=optimizer)
    assert same is model
    assert list(model.state_dict()) == keys
    for module in model.modules():
        assert not [name for name in vars(module) if "speed" in name]
    context.restore()


def test_a_plan_that_fails_to_apply_leaves_everything_as_it_was(
    two_threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from speedkit_jupyter.catalog.threads import Threads

    def broken(*given: object) -> None:
        raise RuntimeError("torn")

    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    before = form(model, optimizer)
    monkeypatch.setattr(Threads, "applied", broken)
    with pytest.raises(RuntimeError, match="torn"):
        applied(model, optimizer, {**PLANS[0], "threads": 1})
    assert form(model, optimizer) == before


def test_a_plan_acts_on_its_own_model_in_its_own_thread() -> None:
    model, other = network(), network()
    optimizer = torch.optim.AdamW(model.parameters())
    context = applied(model, optimizer, PLANS[0])
    dtypes: list[torch.dtype] = []
    x = torch.randn(2, 2, 4, 4)
    with context.autocast():
        thread = threading.Thread(target=lambda: dtypes.append(other(x).dtype))
        thread.start()
        thread.join()
        dtypes.append(model(x).dtype)
    context.restore()
    assert dtypes == [torch.float32, torch.bfloat16]
