"""Which plan is better, why another was not taken, and when a variant leaves a race."""

from __future__ import annotations

import itertools

import pytest

from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.search.objective import is_behind, why_not
from speedkit_jupyter.search.races import Allowance, PlanRace

pytestmark = pytest.mark.usefixtures("made_time")


@pytest.mark.parametrize(
    ("times", "rounds", "best", "waited"),
    list(itertools.product((0.3, 0.9, 1.1, 3), (1, 3, 8, 40), ("baseline", "other"), (0, 1))),
)
def test_a_reason_has_no_infinite_interval(times, rounds, best, waited):
    right = Accuracy("exact")
    records = tuple(
        Record(name, [s] * rounds, accuracy=right, waited_s=[waited * s] * rounds)
        for name, s in (("baseline", 1.0), ("plan", 1 / times), ("other", 1 / 2.0))
    )
    comparison = Comparison(records, {}, 10.0)
    said = why_not(comparison, records[1], best)
    assert "inf" not in said
    assert "[0.00" not in said


def test_a_plan_that_left_a_race_early_is_called_slower_than_the_best():
    records = (Record("baseline", [1.0] * 8), Record("plan", [0.9] * 3))
    said = why_not(Comparison(records, {}, 10.0), records[1], "another plan")
    assert said.startswith("slower than the best, dropped: about 1.11×")


@pytest.mark.parametrize(
    ("baseline_s", "times_s", "behind"),
    [
        ([1.0, 1.1, 0.9], [3.0, 9.0, 2.0], True),
        ([1.0, 1.1, 0.9], [3.0, 9.0, 1.7], False),  # one round was not
        ([1.0, 1.1], [3.0, 9.0], False),  # too few to tell from a disturbance
        ([], [], False),
    ],
)
def test_far_behind_is_every_one_of_three_rounds(baseline_s, times_s, behind):
    assert is_behind(baseline_s, times_s, 2.0) is behind


def records(held_up: int = 0, rounds: int = 3, **seconds: float) -> list[Record]:
    """Return records of these times, whose first rounds other programs held up by 10 s."""
    made = []
    for name, each_s in seconds.items():
        waited_s = [10.0 * (at < held_up) for at in range(rounds)]
        is_fast = each_s == min(seconds.values())
        times_s = [each_s + waited * (3 if is_fast else 1) for waited in waited_s]
        made.append(Record(name, times_s, waited_s=waited_s))
    return made


def leaving(racing: list[Record]) -> list[str]:
    return [record.name for record in PlanRace(Allowance(9.0)).leaving(racing, None)]


def test_what_is_a_fifth_behind_leaves_after_three_rounds_and_not_before():
    steps_s = {"baseline": 1.0, "near": 0.5, "best": 0.45, "far": 0.6}
    assert leaving(records(**steps_s)) == ["baseline", "near", "far"]
    assert leaving(records(rounds=2, **steps_s)) == []


def test_rounds_that_others_held_up_drop_nothing_where_there_are_others():
    steps_s = {"baseline": 1.0, "best": 0.5}
    assert leaving(records(held_up=3, rounds=3, **steps_s)) == ["best"]  # nothing else is known
    assert leaving(records(held_up=3, rounds=6, **steps_s)) == ["baseline"]
