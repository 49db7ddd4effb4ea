"""How the benchmarks of a search go: what can't win leaves, and what is about to win is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.rounds.sampler import Policy
from speedkit_jupyter.tuning.aim import (
    FAR_SLOWER,
    LEAST_SAVED,
    WORTH_IT,
    Aim,
    idlest,
    is_behind,
    memory_saved,
    parts_of,
)
from speedkit_jupyter.tuning.candidates import Candidate

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record

# After RACE_ROUNDS, what is behind the fastest by RACE_BEHIND leaves a race. So does what is behind
# by RACE_ERRORS standard errors of the median, if that is at least RACE_SHARE.
RACE_BEHIND, RACE_ROUNDS, RACE_ERRORS, RACE_SHARE = 1.2, 3, 3.0, 0.01
# After this many rounds those left are equally fast; or once intervals are as narrow as this share.
MOST_RACE_ROUNDS, ENOUGH_TO_CHOOSE = 40, 0.08
# Nothing leaves before all steps together took this long: else a moment's disturbance decides.
LEAST_RACE_S = 0.25
# A standard error is never taken to be smaller: three rounds may agree by chance.
LEAST_SCATTER = 0.005
# What is this many times slower than the baseline in each of some rounds leaves a proof.
BEHIND = 1.1
# The interval of the whole plan has to be as narrow as the larger of these shares: of its median,
# and of what it gains, since the second digit of a threefold speed-up matters little.
PRECISE, PRECISE_GAIN = 0.05, 0.1


class Grid(Policy):
    """Times each variant for its own sake, but for what is far slower in the first rounds."""

    has_limits = False
    times = 2.0

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what is hopeless by its times alone."""
        first = racing[0].times_s
        return [row for row in racing[1:] if is_behind(first, row.times_s, self.times)]


class Race(Grid):
    """Chooses the fastest by successive halving; proves and checks nothing."""

    far_slower = FAR_SLOWER
    checked = 0

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
        ratios = [comparison.ratio(record) for record in racing[1:]] if comparison else [None]
        return all(ratio is not None and ratio.is_precise(ENOUGH_TO_CHOOSE) for ratio in ratios)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield nothing: what leads is checked where it is proven."""
        yield from ()


class Lightest(Race):
    """Chooses by memory, which may cost `within` times the time."""

    weighs = True

    def __init__(self, within: float | None) -> None:
        self.times = within or FAR_SLOWER

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """Return why memory speaks against it, if it does."""
        saved = memory_saved(baseline, record)
        is_lighter = saved == 0 or saved > 1 + LEAST_SAVED
        return "" if is_lighter else f"its peak is {1 / saved:.0%} of {baseline.name}'s"

    leaving = Grid.leaving  # what takes too much time


class Proof(Grid):
    """Goes on until the first plan is precise, and its parts clear; then checks it, and what may be
    left of it, until something is right. Where there is no time for a check it `checks` nothing.
    """

    checks_winner = True
    times = BEHIND

    def __init__(self, plans: Sequence[Candidate], aim: Aim, checks: bool) -> None:
        self._whole, self._aim = plans[0], aim
        self.weighs, self.checked = aim.memory, 2 if checks else 0

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what is slower than the baseline, at a look also a whole that gains nothing."""
        if self._aim.memory:
            return ()
        gone, whole = super().leaving(racing, comparison), self._row(racing)
        ratio = comparison.ratio(whole) if comparison and whole else None
        return [*gone, whole] if whole and ratio and ratio.median <= 1 else gone

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether nothing is left to prove."""
        if comparison is None or len(racing) == 1:
            return len(racing) == 1
        if (whole := self._row(racing)) is None:
            return super().is_over(racing, comparison)
        ratio = comparison.ratio(whole)
        if ratio is None or ratio.verdict == "too noisy":
            return False
        precise = max(PRECISE, PRECISE_GAIN * (ratio.median - 1))
        parts = parts_of(self._whole, comparison) if len(self._whole.values) > 1 else []
        return ratio.is_precise(precise) and all(part.is_clear for part in parts)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the whole, what is left without its idlest part, then others until one is right."""
        records = {record.name: record for record in comparison.records[1:]}
        first = [records[self._whole.name]]
        if idle := idlest(self._whole, comparison):
            first.append(records[self._whole.without(idle).name])
        others = [record for record in records.values() if record not in first]
        for number, record in enumerate([*first, *others] if self.checked else []):
            is_done = any(self._aim.gain(comparison, row, proven=True) for row in records.values())
            if record.times_s and (number < len(first) or not is_done):
                yield record

    def _row(self, racing: Sequence[Record]) -> Record | None:
        return next((row for row in racing[1:] if row.name == self._whole.name), None)


def _is_early(records: Sequence[Record]) -> bool:
    """Return whether a race of these has seen too little to give any of them up."""
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    return rounds < RACE_ROUNDS or (raced_s < LEAST_RACE_S and rounds < MOST_RACE_ROUNDS)


def fallen_behind(records: Sequence[Record]) -> list[Record]:
    """Return those that the fastest leaves behind; all have as many times.

    Times are paired within the rounds. Rounds that others held up are left out if enough remain.
    The scatter of one round is taken from all records together.
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
