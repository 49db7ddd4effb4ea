"""Why a plan that helps is not the one that was taken."""

from __future__ import annotations

import pytest

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.tuning.scoring import why_not


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
    assert why_not(found, other, taken).startswith("helps (")
    assert why_not(found, other, taken).endswith(why)
