"""When a race drops a plan, and when it goes on."""

from __future__ import annotations

from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.search.races import PlanRace, SearchBudget
from speedkit_jupyter.search.tried_plans import TimedPlan


def test_a_plan_that_left_a_race_early_is_called_slower_than_the_best():
    records = (Record("baseline", [1.0] * 8), Record("plan", [0.9] * 3))
    said = TimedPlan(Comparison(records, {}, 10.0), records[1]).why_not("another plan")
    assert said.startswith("slower than the best, dropped: about 1.11×")


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
    return [record.name for record in PlanRace(SearchBudget(9.0)).leaving(racing, None)]


def test_what_is_a_fifth_behind_leaves_after_three_rounds_and_not_before():
    steps_s = {"baseline": 1.0, "near": 0.5, "best": 0.45, "far": 0.6}
    assert leaving(records(**steps_s)) == ["baseline", "near", "far"]
    assert leaving(records(rounds=2, **steps_s)) == []


def test_rounds_that_others_held_up_drop_nothing_where_there_are_others():
    steps_s = {"baseline": 1.0, "best": 0.5}
    assert leaving(records(held_up=3, rounds=3, **steps_s)) == ["best"]  # nothing else is known
    assert leaving(records(held_up=3, rounds=6, **steps_s)) == ["baseline"]


def test_a_race_goes_on_if_no_round_is_whole():
    racing = [Record(name) for name in ("baseline", "a", "b")]  # the first round was left out
    assert not PlanRace(SearchBudget(10.0)).is_over(racing, None)
    assert not leaving(racing)
