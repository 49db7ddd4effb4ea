"""What a benchmark goes by: what it checks, what leaves the rounds, and when they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.results.statistics import least_rounds

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record
    from speedkit_jupyter.measure.rounds.runner import Runner


class Policy:
    """For results that are printed: each variant is checked, and measured until it is clear.

    What `chooses`, and proves nothing, drops what is wrong before the rounds, measures no limits,
    and needs less precision. What is `hasty` warms up as shortly as can be, and measures times
    only. What `weighs` needs each variant's memory, and nothing of machine limits. Records come
    baseline first; `racing` are those that are still in the rounds.
    """

    chooses = False
    hasty = False
    weighs = False

    def least_rounds(self, others: int) -> int:
        """So many tell something about this many variants beside the baseline."""
        return least_rounds(others)

    def why_left_out(self, name: str) -> str:
        """Why the variant of this name is not even run; empty where it is."""
        return ""

    def keeps(self, runner: Runner, baseline: Runner) -> bool:
        """Whether a variant that was warmed up is measured."""
        return True

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """Why a variant that was weighed is not measured; empty where it is."""
        return ""

    def to_check(self, names: Sequence[str]) -> Sequence[str]:
        """What has to be checked before the rounds, where each is right: planned with."""
        return names

    def is_to_check(self, record: Record, records: Sequence[Record]) -> bool:
        """Whether it is checked before the rounds; asked once those before it are."""
        return True

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """What leaves the rounds; asked after each, with a `comparison` at a planned look."""
        return ()

    def is_settled(self, comparison: Comparison, racing: Sequence[Record]) -> bool:
        """Whether the rounds may end, at a planned look."""
        ratios = [comparison.ratio(record) for record in racing]
        return all(ratio.settled for ratio in ratios if ratio)

    def is_over(self, racing: Sequence[Record]) -> bool:
        """Whether they end although nothing was looked at; asked after each round."""
        return False

    def late(self, comparison: Comparison) -> Iterator[Record]:
        """What is checked after the rounds: what was right before them once more.

        The next one is asked for once the one before it is checked.
        """
        yield from comparison.records[1:]
