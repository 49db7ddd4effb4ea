"""Contenders race in shuffled rounds, within a budget that leaves time for checks."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Policy, shares_of_time
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.rounds.statistics import ERROR, LAST_LOOK


def test_each_contender_is_in_each_round_once_and_the_order_changes() -> None:
    orders = [tuple(order) for order in ShuffledRounds("abc", most=60)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) == 60
    assert min(Counter(orders).values()) > 1
    assert len(Counter(orders)) == 6


def test_who_leaves_is_in_no_later_round_and_without_contenders_rounds_end() -> None:
    racing = ["a", "b", "c"]
    rounds, sizes = ShuffledRounds(racing), []
    for order in rounds:
        sizes.append(len(order))
        racing.pop()
    assert sizes == [3, 2, 1]
    assert rounds.has_ended


@pytest.mark.parametrize(("left_s", "least", "taken"), [(10.5, 1, 5), (0.0, 1, 1), (0.0, 3, 3)])
def test_a_round_begins_only_where_the_last_one_would_still_fit(left_s, least, taken) -> None:
    seconds = [left_s]
    rounds = ShuffledRounds("ab", lambda: seconds[0], least=least)
    for order in rounds:
        seconds[0] -= len(order)
    assert rounds.number == taken
    assert rounds.has_ended


def test_looks_are_planned_after_the_first_round_and_err_in_all_as_a_run_may() -> None:
    seconds = [200.0]
    rounds, looks = ShuffledRounds("ab", lambda: seconds[0]), []
    errors = []
    for order in rounds:
        seconds[0] -= len(order)
        if rounds.is_look():
            looks.append(rounds.number)
            errors.append(rounds.error)
    assert looks == list(rounds.looks)
    assert len(looks) > 2
    assert rounds.round_s == 2.0
    assert sum(errors) + rounds.error == pytest.approx(ERROR)
    assert rounds.error == ERROR * LAST_LOOK


def test_a_round_that_is_left_out_does_not_count_and_the_end_can_be_said() -> None:
    rounds, numbers = ShuffledRounds("ab"), []
    for at, _ in enumerate(rounds):
        numbers.append(rounds.number)
        if at == 1:
            rounds.leave_out()
        if at == 3:
            rounds.end()
    assert numbers == [1, 2, 2, 3]
    assert rounds.has_ended


def planned(budget_s: float, *steps_s: float) -> tuple[list[Runner], float, float]:
    """Return the variants that fit the budget, and the seconds for rounds and for checks."""
    runners: list[Any] = [
        SimpleNamespace(
            usual_s=step_s,
            worst_s=step_s,
            fastest_s=step_s,
            precision="fp32",
            leave_out=lambda first, budget: None,
            times_slower=lambda first, step_s=step_s: step_s / first.fastest_s,
        )
        for step_s in steps_s
    ]
    return shares_of_time(runners, Policy(), Budget(budget_s, lambda: 0.0))


def seconds(runners: list[Runner]) -> list[float]:
    return [runner.usual_s for runner in runners]


def test_a_hopeless_variant_is_left_out_before_the_last():
    found = seconds(planned(5.0, 0.1, 0.5, 0.1, 0.09)[0])
    assert found[:2] == [0.1, 0.1]
    assert 0.5 not in found


@pytest.mark.parametrize("budget_s", [2.0, 9.0, 60.0, 900.0])
def test_rounds_and_checks_share_the_budget(budget_s):
    _, rounds_s, checks_s = planned(budget_s, 0.1, 0.1, 0.09)
    assert rounds_s + checks_s == pytest.approx(budget_s)
    assert 0 < checks_s <= budget_s / 2


def test_two_stay_where_one_step_of_each_fits():
    assert seconds(planned(2.0, 0.5, 0.6, 0.4)[0]) == [0.5, 0.6]
    assert seconds(planned(2.0, 1.5, 1.6)[0]) == [1.5]
