"""Loss curves with and without a plan: same data, same seed, and what an own fault looks like."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, StepError, apply_speedups, verify
from speedkit_jupyter.search.verification import ROUNDING, Losses, Verification, Verifier, jitter
from speedkit_jupyter.step.step import Step

Parts = tuple[nn.Module, Any, Callable[[], None]]


def training(
    dropout: float = 0.0, spoiled: Callable[[Any], None] = lambda optimizer: None
) -> Parts:
    """A network that learns, its optimizer and its step; `spoiled` may disturb a step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    x, y = torch.rand(32, 6), torch.randint(3, (32,))
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        loss_fn(network(x), y).backward()
        spoiled(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return network, optimizer, step


def test_a_plan_that_only_rounds_keeps_the_curve_and_everything_is_put_back():
    network, optimizer, step = training(dropout=0.3)
    before = copy.deepcopy(network.state_dict())
    state = (torch.get_rng_state(), random.getstate())
    found = verify(step, "bf16+fused_optimizer", steps=12)
    assert found.verdict == "same"
    assert found.plan == {"precision": "bf16", "fused_optimizer": True}
    assert len(found.loss.baseline) == len(found.loss.planned) == len(found.loss.other) == 12
    assert found.loss.baseline[-1] < found.loss.baseline[0]
    assert found.loss.other != found.loss.baseline
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert not optimizer.state
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()


@pytest.mark.parametrize("factor", [-1.0, math.nan, 0.0])
def test_a_plan_that_spoils_training_is_seen(factor):
    def spoiled(optimizer: Any) -> None:
        if optimizer.param_groups[0]["fused"]:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(factor)

    found = verify(training(spoiled=spoiled)[2], "fused_optimizer", steps=20)
    assert found.verdict == "worse"


def test_every_run_gets_the_same_data_and_each_step_new_data():
    network, optimizer, _ = training()
    drawn: list[float] = []
    names: dict[str, Any] = {"batches": (torch.full((4, 6), float(i)) for i in range(100))}

    def run(context: Any) -> None:
        batch = next(names["batches"])
        drawn.append(float(batch[0, 0]))
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = Step(run, [network], [optimizer], names=names, iterators=["batches"])
    verifier = Verifier(step, "bf16", steps=5)
    for _ in verifier.run():
        pass
    assert drawn[:10] == [0.0, 1.0, 2.0, 3.0, 4.0] * 2
    assert float(next(names["batches"])[0, 0]) == 0.0


def test_the_plan_in_force_is_what_is_verified_and_stays_in_force():
    network, optimizer, step = training()
    _, context = apply_speedups(
        network, SpeedConfig.from_dict({"precision": "bf16"}), optimizer=optimizer
    )
    with context:
        found = verify(step, steps=4)
        assert found.plan["precision"] == "bf16"
        assert context.active


def test_a_plan_that_fails_is_a_verdict_and_not_a_traceback():
    def spoiled(optimizer: Any) -> None:
        if optimizer.param_groups[0]["fused"]:
            raise RuntimeError("out of luck\nand more")

    found = verify(training(spoiled=spoiled)[2], "fused_optimizer", steps=4)
    assert found.verdict == "failed"
    assert found.failure == "RuntimeError: out of luck"
    assert "out of luck" in repr(found)


def test_what_cannot_be_verified_is_one_clear_error():
    network, _, step = training()
    with pytest.raises(StepError, match="changes nothing"):
        verify(step, "baseline", steps=3)
    with pytest.raises(StepError, match="2 steps"):
        verify(step, "bf16", steps=1)
    with pytest.raises(StepError, match="no backward"):
        verify(lambda: network(torch.rand(2, 6)), "bf16", steps=3)
    with pytest.raises(StepError, match="no model"):
        verify(lambda: None, "bf16", steps=3)
    hidden = ((torch.rand(2, 6) for _ in range(9)),)  # a tuple can't hold another in its place
    with pytest.raises(StepError, match="generator"):
        verify(lambda: network(next(hidden[0])).sum().backward(), "bf16", steps=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_other_baselines_begin_from_weights_moved_by_a_rounding(dtype):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2000).to(dtype))
    before = model.weight.detach().to(torch.complex128)
    jitter([model])
    moved = (model.weight.detach().to(torch.complex128) - before).abs() / before.abs()
    assert (moved > 0).double().mean() > 0.7
    assert moved.max() <= 1.001 * max(ROUNDING, torch.finfo(dtype).eps) + torch.finfo(dtype).eps


def test_the_verdict_is_the_yardsticks():
    def run(losses: list[float]) -> list[Losses]:
        return [Losses(ran_on=[one]) for one in losses]

    runs = [run([4.0, 3.0, 2.0, 1.0]), run([4.0, 3.1, 2.1, 1.1]), run([4.0, 3.2, 2.2, 1.0])]
    found = Verification("plan", runs=runs)
    assert found.verdict == "same"
    runs[2] = runs[0]
    assert found.verdict == "worse"
    runs[1] = run([4.0, 2.9, 1.9, 0.9])
    assert found.verdict == "different"
