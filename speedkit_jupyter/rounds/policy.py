"""The policy of a benchmark: which variants are timed, how long, and which are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import least_rounds

# Verdicts that can't win, and the verdict "faster".
LOST, AHEAD = ("slower", "same"), ("faster", "other model")


class Policy:
    """Time each variant until its verdict is clear, then check it.

    A benchmark calls each member at one time. The baseline is the first record; `racing` records
    are timed. A search overrides members in a race (`search.races.PlanRace`) and in a proof
    (`search.races.Proof`).

    | member | called | overridden in |
    | --- | --- | --- |
    | `most_times_slower` | after the first steps of each variant | race |
    | `checked`, `least_rounds`, `rounds_s` | once, to plan the time | race; proof: `checked` |
    | `staying`, `leaving`, `is_over` | after every complete round | race, proof |
    | `measures_memory` | after the rounds | race, proof |
    | `proves`, `to_check` | last, for the checks | race: `to_check`; proof |
    """

    most_times_slower = math.inf  # variants this many times slower in warm-up are not timed
    checked: int | None = None  # approximate number of checked variants; None for all
    proves = False  # True if checks are mandatory
    measures_memory = True

    @property
    def rounds_s(self) -> float:
        """Return the time limit of the rounds, out of the remaining seconds."""
        return math.inf

    def least_rounds(self, others: int) -> int:
        """Return the number of rounds needed to decide about this many variants."""
        return least_rounds(others)

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return the records to drop after a round; only planned tests have a `comparison`."""
        return ()

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether the rounds end after this one; at planned tests, `comparison` decides."""
        ratios = [comparison.ratio(record) for record in racing] if comparison else []
        return comparison is not None and all(ratio.settled for ratio in ratios if ratio)

    def staying(self, racing: list[Record], comparison: Comparison | None) -> list[Record]:
        """Return the records of the next round; empty if the rounds are over."""
        if self.is_over(racing, comparison):
            return []
        gone = set(map(id, self.leaving(racing, comparison)))
        staying = [racing[0], *(record for record in racing[1:] if id(record) not in gone)]
        if len(staying) == len(racing):
            return racing
        return [] if len(staying) == 1 or self.is_over(staying, comparison) else staying

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the records to check, likely winners first; each is checked before the next."""
        verdicts = {record.name: comparison.verdict(record) for record in comparison.records[1:]}
        timed = [r for r in comparison.records[1:] if r.times_s and verdicts[r.name] not in LOST]
        yield from sorted(timed, key=lambda r: (verdicts[r.name] not in AHEAD, median(r.times_s)))
