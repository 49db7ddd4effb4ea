"""When a variant leaves a race."""

from __future__ import annotations

import pytest

from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.tuning.aim import is_behind
from speedkit_jupyter.tuning.races import Race


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
    return [record.name for record in Race().leaving(racing, None)]


def test_what_is_a_fifth_behind_leaves_after_three_rounds_and_not_before():
    steps_s = {"baseline": 1.0, "near": 0.5, "best": 0.45, "far": 0.6}
    assert leaving(records(**steps_s)) == ["baseline", "near", "far"]
    assert leaving(records(rounds=2, **steps_s)) == []


def test_rounds_that_others_held_up_drop_nothing_where_there_are_others():
    steps_s = {"baseline": 1.0, "best": 0.5}
    assert leaving(records(held_up=3, rounds=3, **steps_s)) == ["best"]  # nothing else is known
    assert leaving(records(held_up=3, rounds=6, **steps_s)) == ["baseline"]
