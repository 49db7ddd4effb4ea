"""Why a plan was not taken: in words that contradict neither themselves nor their numbers."""

from __future__ import annotations

import itertools
import re

import pytest

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.tuning.aim import Aim


@pytest.mark.parametrize(
    ("times", "rounds", "best", "waited"),
    list(itertools.product((0.3, 0.9, 1.1, 3), (1, 3, 8, 40), ("baseline", "other"), (0, 1))),
)
def test_a_reason_has_no_infinite_interval_and_nothing_falls_behind_what_is_slower(
    times, rounds, best, waited
):
    right = Accuracy("exact")
    records = tuple(
        Record(name, [s] * rounds, accuracy=right, waited_s=[waited * s] * rounds)
        for name, s in (("baseline", 1.0), ("plan", 1 / times), ("other", 1 / 2.0))
    )
    comparison = Comparison(records, {}, 10.0)
    said = Aim().why_not(comparison, records[1], best)
    assert "inf" not in said
    assert "[0.00" not in said
    if behind := re.search(r"falls behind (\w+)", said):
        (leader,) = [one for one in records if one.name == behind[1]]
        assert leader.times_s[0] <= records[1].times_s[0]


def record(name: str, factor: float) -> Record:
    times_s = [0.01 * factor * (1 + i % 5 / 100) for i in range(40)]
    return Record(name, times_s, 0.5, accuracy=Accuracy("exact"))


@pytest.mark.parametrize(
    ("factor", "taken", "why"),
    [
        (0.50, "bf16", "bf16 as much, with fewer parts"),
        (0.60, "bf16", "bf16 more"),
        (0.50, "bf16+threads:1+fused_optimizer", "bf16+threads:1+fused_optimizer more"),
    ],
)
def test_the_plan_that_was_taken_gained_more_or_had_fewer_parts(factor, taken, why):
    other = record("bf16+threads:1", factor)
    found = Comparison((record("baseline", 1), record(taken, 0.51), other), {}, 10)
    assert Aim().why_not(found, other, taken).startswith("helps (")
    assert Aim().why_not(found, other, taken).endswith(why)
