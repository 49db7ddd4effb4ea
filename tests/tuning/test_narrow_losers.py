"""Few rounds of a race are no proof that nothing helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import tune
from speedkit_jupyter.support import database

pytestmark = pytest.mark.usefixtures("trusted")

# Until after the race: warm-up, check and rounds of two that take 0.05 s.
DISTURBED_S = 2.5


@pytest.fixture
def tuned(made_time, machine) -> Any:
    """`tuned(seconds)`: searches; the step takes `seconds(fused, since)` after so many of them.

    On a pinned machine: what it suggests comes first, and decides when the others have their turn.
    """
    machine("cpu")

    def run(seconds: Any) -> Any:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        optimizer = torch.optim.AdamW(network.parameters())
        x, began = torch.rand(2, 1, 8, 8), made_time.now_s()

        def step() -> None:
            fused = bool(optimizer.param_groups[0]["fused"])
            times = 3 if network[0].weight.stride()[1] == 1 else 1
            made_time.sleep(times * seconds(fused, made_time.now_s() - began))
            network(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return tune(step, model=network, optimizer=optimizer, budget_s=20)

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("later", "helps"), [(0.93, True), (0.97, True), (1.06, False)])
@pytest.mark.slow
def test_what_lost_narrowly_is_measured_with_rounds_enough(tuned, later, helps):
    # A disturbance of the first steps, which the race sees; after its third round it ends.
    def seconds(fused: bool, since: float) -> float:
        return 0.05 * ((1.03 if since < DISTURBED_S else later) if fused else 1.0)

    tuning = tuned(seconds)
    assert "what lost narrowly" in [one.title for one in tuning.stages]
    assert (tuning.winner.name == "fused_optimizer") is helps
    assert not tuning.unclear
    assert [one.plan["values"] for one in database.learned()] == [tuning.winner.values]


def test_what_can_not_be_told_is_not_remembered_as_nothing_helps(tuned):
    tuning = tuned(lambda fused, since: 0.8 * (1.02 if fused else 1.0))
    assert not tuning.helped
    assert "Could not tell" in repr(tuning)
    assert database.learned() == []


@pytest.mark.parametrize(
    ("compiling_s", "said"), [(44.0, "(in 50 s, 44 s of them compiling)"), (0.0, "(in 50 s)")]
)
def test_the_seconds_of_compiling_are_said(tuned, compiling_s, said):
    tuning = tuned(lambda fused, since: 0.01 * (1 + fused))
    tuning.seconds, tuning.compiling_s = 50.0, compiling_s
    assert said in " ".join(repr(tuning).split())
    assert tuning.to_dict()["compiling_s"] == compiling_s
