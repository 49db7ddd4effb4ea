"""A search names what makes another model only where the user's own number accepts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import tune
from speedkit_jupyter.support import database
from speedkit_jupyter.tuning.outcome import Tuning

LATE = 0.008  # seconds of a slow step, on the tests' own clock


class Work:
    """A step that is fast with the tanh approximation of GELU alone."""

    def __init__(self, made: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        self.x, self._made = torch.rand(2, 4), made

    def step(self) -> torch.Tensor:
        self._made.sleep(LATE / 2 if self.is_another() else LATE)
        with torch.no_grad():
            return self.model(self.x)

    def is_another(self) -> bool:
        return self.model[1].approximate == "tanh"

    def accuracy(self, another: float) -> Callable[[], float]:
        def evaluate() -> float:
            self.model(self.x)
            return another if self.is_another() else 0.9

        return evaluate


@pytest.fixture
def work(made_time) -> Work:
    return Work(made_time)


def words(found: Tuning) -> str:
    return " ".join(repr(found).split())


def test_what_is_accepted_and_faster_is_the_plan(work):
    found = tune(work.step, budget_s=3.0, fresh=True, accuracy=work.accuracy(0.899))
    assert "rewrites" in found.winner.values
    assert found.confirmed
    assert found.ratio.low > 1
    assert "accepted, 0.001 is given up, 0.009 is allowed" in words(found)
    assert not work.is_another()
    contexts = found.apply()
    assert work.is_another()
    for context in contexts:
        context.restore()
    assert not work.is_another()
    assert all("rewrites" not in entry.plan["values"] for entry in database.learned())


@pytest.mark.slow
def test_what_gives_up_too_much_is_not_and_the_reason_has_the_number(work):
    found = tune(work.step, budget_s=3.0, fresh=True, accuracy=work.accuracy(0.5))
    assert "rewrites" not in found.winner.values
    assert "evaluate gives up 0.4, 0.009 is allowed" in words(found)
    allowed = tune(work.step, budget_s=3.0, fresh=True, accuracy=work.accuracy(0.5), allowed=0.4)
    assert "rewrites" in allowed.winner.values


def test_a_function_that_gives_no_number_costs_nothing_of_what_was_found(work):
    found = tune(work.step, budget_s=3.0, fresh=True, accuracy=lambda: None)
    assert "Other models were not tried: accuracy gives NoneType" in words(found)
    assert "rewrites" not in found.winner.values
