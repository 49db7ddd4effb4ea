"""Which plan is better, why another was not taken, and when a variant leaves a race."""

from __future__ import annotations

import itertools

import pytest

from speedkit_jupyter.right.accuracy import Accuracy
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.search.objective import Aim, is_behind
from speedkit_jupyter.search.races import Allowance, PlanRace
from speedkit_jupyter.step.memory import MemoryUse

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
    said = Aim().why_not(comparison, records[1], best)
    assert "inf" not in said
    assert "[0.00" not in said


def test_a_plan_that_left_a_race_early_is_called_slower_than_the_best():
    records = (Record("baseline", [1.0] * 8), Record("plan", [0.9] * 3))
    said = Aim().why_not(Comparison(records, {}, 10.0), records[1], "another plan")
    assert said.startswith("slower than the best, dropped: about 1.11×")


def record(name: str, times: float, peak: int, rounds: int = 40, spread: int = 1) -> Record:
    """Of steps that take so many times 10 ms, give or take `spread` percent."""
    times_s = [0.01 * times * (1 + spread * (at % 5 - 2) / 100) for at in range(rounds)]
    return Record(name, times_s, 0.5, accuracy=Accuracy("exact"), memory=MemoryUse(peak, 1))


@pytest.mark.parametrize(
    ("times", "within", "rounds", "gain", "why"),
    [
        (1.15, 1.2, 40, 2.0, "its peak is 50% of baseline's"),
        (1.4, 1.2, 40, 0.0, "but it takes 1.40 times the time: at most 1.2 is not proven"),
        (1.4, None, 40, 2.0, "its peak is 50% of baseline's"),
        (1.15, 1.2, 5, 0.0, "but it takes 1.15 times the time: at most 1.2 is not proven"),
    ],
)
def test_less_memory_is_taken_where_its_time_is_proven_to_be_allowed(
    times, within, rounds, gain, why
):
    one = record("checkpoint", times, 500, rounds)
    found, aim = Comparison((record("baseline", 1, 1000), one), {}, 10), Aim(True, within)
    assert aim.gain(found, one, proven=True) == pytest.approx(gain)
    assert why in aim.why_not(found, one, "x")
    assert ("but it takes" in aim.why_not(found, one, "x")) is (gain == 0)


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
    """Of steps that take so long, but for the first rounds, which others held up by 10 s."""
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
