"""What the machine counts of a profiled step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import profile
from speedkit_jupyter.measure.checks.counted_columns import Quantity
from speedkit_jupyter.profiling import counters
from speedkit_jupyter.profiling.counters import Counters

CPU = torch.device("cpu")


@pytest.fixture
def joules(monkeypatch) -> list[float]:
    """A machine that counts what is in the list."""
    counted = [0.0]
    energy = Quantity("energy_j", "energy", "J", "", lambda device: lambda: sum(counted))
    monkeypatch.setattr(counters, "QUANTITIES", (energy,))
    return counted


def test_only_what_is_counted_during_the_calls_is_theirs(joules):
    def call() -> float:
        joules.append(3.0)
        return 0.5

    counted = Counters(CPU)
    counted.counted(call)
    joules.append(100.0)  # a restore in between
    counted.counted(call)
    assert counted.each_second() == {"energy_j": pytest.approx(6.0)}


def test_a_profile_says_its_joules_where_they_are_counted(joules, made_time):
    net = nn.Linear(2, 2)

    def step() -> None:
        net(torch.ones(5, 2))
        made_time.sleep(0.2)
        joules.append(0.5)

    found = profile(step, budget_s=8, model=net)
    assert found.to_dict()["energy_j"] == pytest.approx(0.5, rel=0.1)
    assert found.to_dict()["energy_per_sample_j"] == pytest.approx(0.1, rel=0.1)
    assert "Energy: 0.5 J a step, 0.1 J a sample" in str(found)
