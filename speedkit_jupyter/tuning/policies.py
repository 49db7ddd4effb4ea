"""How the benchmarks of a search go: what can't win leaves, and what is about to win is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.accuracy import is_right
from speedkit_jupyter.measure.rounds.policy import Policy

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record

# A gain below this is not worth a change. Compiling has to bring it over the best plan without it,
# since it takes seconds at every start.
WORTH_IT = 1.02
# A plan that saves less memory than this share is not worth a change.
LEAST_SAVED = 0.01
# What is slower by so much while warming up is not timed, nor does less memory make up for it.
FAR_SLOWER = 3.0
# What is slower by so much in each of so many rounds can't be worth more of them.
BEHIND, FAR_ROUNDS = 1.1, 3
# In a race what is behind the fastest by so much after so many rounds leaves at once; later on
# what is behind by so many standard errors of the median, and by at least this share.
RACE_BEHIND, RACE_ROUNDS, RACE_ERRORS, RACE_SHARE = 1.2, 3, 3.0, 0.01
# What is left after so many rounds is as fast; or where intervals are as narrow as this share.
MOST_RACE_ROUNDS, ENOUGH_TO_CHOOSE = 40, 0.08
# Nothing leaves before the steps have taken so many seconds in all: what disturbs a machine for a
# moment would else be all that a race of short steps has seen.
LEAST_RACE_S = 0.25
# A standard error is never taken to be smaller: three rounds may agree by chance.
LEAST_SCATTER = 0.005


class Race(Policy):
    """Chooses the fastest by successive halving, and proves nothing: only what leads is checked."""

    far_slower = FAR_SLOWER
    checked = 1
    has_limits = False

    def least_rounds(self, others: int) -> int:
        """Return after how many rounds the first leave."""
        return RACE_ROUNDS

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what the fastest leaves behind."""
        return [] if _is_early(racing) else fallen_behind(racing)

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether one is left beside the baseline, or those left can be told apart."""
        if len(racing[0].times_s) >= MOST_RACE_ROUNDS:
            return True
        if len(racing) <= 2:
            return not _is_early(racing)
        ratios = [comparison.ratio(record) for record in racing] if comparison else [None]
        return all(ratio.is_precise(ENOUGH_TO_CHOOSE) for ratio in ratios[1:] if ratio) and (
            comparison is not None
        )

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield what leads; where it is not right, what leads without it."""
        rounds = len(comparison.baseline.times_s)
        racing = [row for row in comparison.records if rounds and len(row.times_s) == rounds]
        for row in sorted(racing, key=lambda row: median(row.times_s)):
            if row is comparison.baseline:
                return
            yield row
            if is_right(row.accuracy):
                return


class Grid(Policy):
    """Times each variant for its own sake, but for what is far slower in the first rounds."""

    has_limits = False

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what is hopeless by its times alone."""
        first = racing[0].times_s
        return [row for row in racing[1:] if is_behind(first, row.times_s, 2.0)]


class Lightest(Grid):
    """Chooses by memory, which may cost `within` times the time."""

    weighs = True

    def __init__(self, within: float | None = None) -> None:
        self._times = FAR_SLOWER if within is None else within

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """Return why memory speaks against it, if it does."""
        saved = memory_saved(baseline, record)
        is_lighter = saved == 0 or saved > 1 + LEAST_SAVED
        return "" if is_lighter else f"its peak is {1 / saved:.0%} of {baseline.name}'s"

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what costs too much time."""
        first, times = racing[0].times_s, self._times
        return [row for row in racing[1:] if is_behind(first, row.times_s, times)]

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the lightest first, until one is right."""
        first = comparison.baseline
        timed = [record for record in comparison.records[1:] if record.times_s]
        for record in sorted(timed, key=lambda row: -memory_saved(first, row)):
            yield record
            if is_right(record.accuracy):
                return


def _is_early(records: Sequence[Record]) -> bool:
    """Whether a race of these has seen too little to give any of them up."""
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    return rounds < RACE_ROUNDS or (raced_s < LEAST_RACE_S and rounds < MOST_RACE_ROUNDS)


def fallen_behind(records: Sequence[Record]) -> list[Record]:
    """Return those that the fastest leaves behind; all have as many times.

    Paired within the rounds, those that others held up left out where there are enough without;
    the scatter of one round is taken from all records together.
    """
    import numpy as np

    logs = np.log(np.array([record.times_s for record in records]))
    held_up = np.array([any(row) for row in zip(*(r.interrupted for r in records), strict=False)])
    if len(held_up) == logs.shape[1] and (~held_up).sum() >= RACE_ROUNDS:
        logs = logs[:, ~held_up]
    # What compiles has to lead by what it has to bring; else nothing is left to tell.
    logs += np.log([WORTH_IT if record.is_compiled else 1.0 for record in records])[:, None]
    behind = logs - logs[np.argmin(np.median(logs, axis=1))]
    medians = np.median(behind, axis=1)
    deviations = np.median(np.abs(behind - medians[:, None]), axis=1)[medians > 0]
    scatter = max(1.48 * float(np.median(deviations)) if len(deviations) else 0.0, LEAST_SCATTER)
    margin = max(RACE_ERRORS * 1.25 * scatter / logs.shape[1] ** 0.5, RACE_SHARE)
    margin = min(margin, math.log(RACE_BEHIND))
    return [record for record, median in zip(records, medians, strict=True) if median > margin]


def is_behind(baseline_s: Sequence[float], times_s: Sequence[float], times: float) -> bool:
    """Return whether every one of some rounds was so many `times` slower: no verdict, but not
    worth waiting for one.
    """
    pairs = list(zip(baseline_s, times_s, strict=False))
    return len(pairs) >= FAR_ROUNDS and all(slow > times * base for base, slow in pairs)


def memory_saved(baseline: Record, record: Record) -> float:
    """Return how many times less memory it needs at its fullest moment; 0 where not known."""
    before, now = baseline.memory, record.memory
    if not (before and now and before.peak_bytes and now.peak_bytes):
        return 0.0
    return before.peak_bytes / now.peak_bytes


def costs_too_much(baseline: Record, record: Record) -> bool:
    """Return whether it is slower by more than less memory is worth."""
    return "dropped" in record.notes or is_behind(baseline.times_s, record.times_s, FAR_SLOWER)
