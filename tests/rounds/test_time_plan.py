"""The division of a budget between the rounds of variants and their checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.policy import Policy
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import TimePlan, time_plan


def planned(budget_s: float, *steps_s: float) -> TimePlan:
    """Return the plan for variants of these steps, on a clock that never moves."""
    runners: list[Any] = [
        SimpleNamespace(
            usual_s=step_s,
            worst_s=step_s,
            fastest_s=step_s,
            precision="fp32",
            times_slower=lambda first, step_s=step_s: step_s / first.fastest_s,
        )
        for step_s in steps_s
    ]
    return time_plan(runners, Policy(), Budget(budget_s, lambda: 0.0))


def seconds(runners: list[Runner]) -> list[float]:
    return [runner.usual_s for runner in runners]


def test_a_hopeless_variant_is_left_out_before_the_last():
    found = planned(5.0, 0.1, 0.5, 0.1, 0.09)
    assert seconds(found.left_out)[0] == 0.5
    assert seconds(found.runners)[:2] == [0.1, 0.1]


@pytest.mark.parametrize("budget_s", [2.0, 9.0, 60.0, 900.0])
def test_rounds_and_checks_share_the_budget(budget_s):
    found = planned(budget_s, 0.1, 0.1, 0.09)
    assert found.rounds_s + found.reserved_s == pytest.approx(budget_s)
    assert 0 < found.reserved_s <= budget_s / 2


def test_two_stay_where_one_step_of_each_fits():
    assert seconds(planned(2.0, 0.5, 0.6, 0.4).runners) == [0.5, 0.6]
    assert seconds(planned(2.0, 1.5, 1.6).runners) == [1.5]
