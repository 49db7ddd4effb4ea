"""When variants leave the rounds, when the rounds end, and what is checked after them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.results.statistics import least_rounds

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record


class Policy:
    """For results that are printed: each variant is timed until it is clear, then checked.

    A search's are subclasses. Records come baseline first; `racing` are those still in the rounds.
    `far_slower` is how many times slower a variant may be in its warm-up and still be timed;
    `checked` is about how many variants are checked, or None for all; one that `checks_winner`
    checks the first of them whatever time is left. One that `weighs` has the memory of each variant
    measured before the rounds; one that `has_limits`, memory and machine limits after them.
    """

    far_slower = math.inf
    checked: int | None = None
    checks_winner = False
    weighs = False
    has_limits = True

    def least_rounds(self, others: int) -> int:
        """Return how many rounds tell something about this many variants beside the baseline."""
        return least_rounds(others)

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """Return why a weighed variant is not timed; empty where it is."""
        return ""

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what leaves after a round; at a planned look there is a `comparison`."""
        return ()

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether the rounds end after this one; at a planned look with a `comparison`."""
        ratios = [comparison.ratio(record) for record in racing] if comparison else []
        return comparison is not None and all(ratio.settled for ratio in ratios if ratio)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield what is checked; the next is asked for once the one before it is judged."""
        timed = [record for record in comparison.records[1:] if record.times_s]
        yield from sorted(timed, key=lambda record: median(record.times_s))
