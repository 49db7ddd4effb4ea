"""When a search gives a variant up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.tuning.early_stopping import cannot_win, is_far_behind, is_too_slow


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
    assert is_far_behind(baseline_s, times_s) is behind


def compared(**speedups: float) -> Comparison:
    """Exact times: each variant is so many times as fast as baseline in every round."""
    records = [Record("baseline", [1.0] * 40)]
    records += [Record(name, [1 / speedup] * 40) for name, speedup in speedups.items()]
    return Comparison(tuple(records), {}, 10.0)


def test_what_gains_next_to_nothing_is_dropped_and_what_helps_is_kept():
    comparison = compared(slow=0.9, little=1.01, good=1.2, best=1.5)
    kept = [one.name for one in comparison.records[1:] if not cannot_win(comparison, one)]
    assert kept == ["good", "best"]


@pytest.mark.parametrize(
    ("fastest_s", "worst_s", "gives_up"), [(4, 1, True), (4, 5, False), (2, 1, False)]
)
def test_a_slow_warm_up_gives_a_variant_up_where_the_baselines_was_never_as_slow(
    fastest_s, worst_s, gives_up
):
    baseline = SimpleNamespace(fastest_s=1.0, worst_s=worst_s, record=Record("baseline"))
    runner = SimpleNamespace(fastest_s=fastest_s, record=Record("bf16"))
    assert is_too_slow(runner, baseline) is gives_up
    assert ("dropped" in runner.record.notes) is gives_up
