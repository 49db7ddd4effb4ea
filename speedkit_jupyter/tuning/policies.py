"""How the stages of a search measure: what can't win any more need not be measured exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.accuracy import is_right
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.tuning import early_stopping
from speedkit_jupyter.tuning.culprits import Culprits
from speedkit_jupyter.tuning.right_parts import RightParts

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record
    from speedkit_jupyter.measure.rounds.runner import Runner


class Grid(Policy):
    """Each variant for its own sake, but for what is far slower in each of the first rounds."""

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """By the times alone."""
        first = racing[0].times_s
        return [
            record for record in racing[1:] if early_stopping.is_far_behind(first, record.times_s)
        ]


class Lightest(Grid):
    """Chooses by memory, which may cost time: only what is slower by more than that leaves."""

    chooses = True
    weighs = True

    def __init__(self, within: float | None = None) -> None:
        self._times = early_stopping.TOO_SLOW if within is None else within

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """It saves nothing."""
        saved = early_stopping.saved(baseline, record)
        is_lighter = saved == 0 or saved > 1 + early_stopping.LEAST_SAVED
        return "" if is_lighter else f"its peak is {1 / saved:.0%} of {baseline.name}'s"

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """By the times alone."""
        first, times = racing[0], self._times
        return [row for row in racing[1:] if early_stopping.costs_too_much(first, row, times)]


class Look(Grid):
    """A few rounds, unchecked: whether there is anything to prove."""

    chooses = True
    hasty = True

    def least_rounds(self, others: int) -> int:
        """Enough to see what is clearly slower."""
        return early_stopping.RACE_ROUNDS

    def to_check(self, names: Sequence[str]) -> Sequence[str]:
        """Nothing."""
        return ()

    def is_to_check(self, record: Record, records: Sequence[Record]) -> bool:
        """Nothing."""
        return False

    def is_over(self, racing: Sequence[Record]) -> bool:
        """After those."""
        return len(racing) < 2 or len(racing[0].times_s) >= early_stopping.RACE_ROUNDS

    def late(self, comparison: Comparison) -> Iterator[Record]:
        """Nothing."""
        yield from ()


class Worthwhile(Grid):
    """Chooses among what is known to gain something worth a change."""

    chooses = True

    def keeps(self, runner: Runner, baseline: Runner) -> bool:
        """Not what is far slower."""
        return not early_stopping.is_too_slow(runner, baseline)

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """At a look also what gains nothing worth it."""
        if comparison is None:
            return super().hopeless(racing, None)
        return [record for record in racing[1:] if early_stopping.cannot_win(comparison, record)]

    def is_settled(self, comparison: Comparison, racing: Sequence[Record]) -> bool:
        """Each verdict is clear, and precise enough to choose by."""
        return early_stopping.is_clear_enough(comparison, racing)


class Checking(Policy):
    """Only what has a part that is not known to be `right`, and all that is `firm`."""

    def __init__(self, right: RightParts, firm: Sequence[str] = ()) -> None:
        self._right, self._firm = right, frozenset(firm)

    def to_check(self, names: Sequence[str]) -> Sequence[str]:
        """As planned: what is checked on the way makes others known."""
        needed = self._firm.union(self._right.to_check(names))
        return [name for name in names if name in needed]

    def is_to_check(self, record: Record, records: Sequence[Record]) -> bool:
        """Whether nothing is known of one of its parts by now, or it is what all is about."""
        for row in records:
            if is_right(row.accuracy):
                self._right.note(row.name)
        return record.name in self._firm or not self._right.are_all_of(record.name)

    def late(self, comparison: Comparison) -> Iterator[Record]:
        """What is firm."""
        yield from [record for record in comparison.records[1:] if record.name in self._firm]


class Race(Checking):
    """Chooses the fastest: what falls behind leaves, by rounds too few to prove it.

    Variants with a part that `culprits` knows as far slower are not run.
    """

    chooses = True
    hasty = True

    def __init__(self, right: RightParts, culprits: Culprits) -> None:
        super().__init__(right)
        self._culprits = culprits

    def least_rounds(self, others: int) -> int:
        """Before these nothing leaves."""
        return early_stopping.RACE_ROUNDS

    def why_left_out(self, name: str) -> str:
        """A part of it was far slower before."""
        return self._culprits.why(name)

    def keeps(self, runner: Runner, baseline: Runner) -> bool:
        """Not what is far slower, which is remembered."""
        slow = early_stopping.is_too_slow(runner, baseline)
        self._culprits.note(runner.record.name, slow)
        return not slow

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """What the fastest leaves behind."""
        return early_stopping.fallen_behind(racing)

    def is_settled(self, comparison: Comparison, racing: Sequence[Record]) -> bool:
        """Intervals may tell before the race is over."""
        return early_stopping.is_clear_enough(comparison, racing)

    def is_over(self, racing: Sequence[Record]) -> bool:
        """One is left beside the first, or nothing is left to tell."""
        if len(racing) <= 2 and not early_stopping.is_early(racing):
            return True
        return len(racing[0].times_s) >= early_stopping.MOST_RACE_ROUNDS

    def late(self, comparison: Comparison) -> Iterator[Record]:
        """What leads; where it is wrong, what leads without it."""
        rounds = len(comparison.baseline.times_s)
        racing = [row for row in comparison.records if rounds and len(row.times_s) == rounds]
        for row in sorted(racing, key=lambda row: median(row.times_s)):
            if row is comparison.baseline or row.accuracy or self._right.is_known(row.name):
                break
            yield row
            if is_right(row.accuracy):
                self._right.note(row.name)
                break
