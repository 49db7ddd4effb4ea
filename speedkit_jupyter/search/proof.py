"""The proof of a plan in fresh rounds: against the baseline, and the plan without each part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from speedkit_jupyter.rounds import statistics, stopping
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.policy import Policy
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.races import clearly_slower, leader, least_gain
from speedkit_jupyter.search.tried_plans import LEAST_WORTH_FINDING, TimedPlan

# A proof ends when the plan's interval is this narrow to both sides, or as narrow as the
# difference between processes.
PRECISE_PLAN = 0.08
# A part's ratio is precise enough with this interval: processes differ by more, and a wrong choice
# costs at most a third of that.
PRECISE_PART = 0.05
# After this many rounds, rivals and parts no longer matter, and twice PRECISE_PLAN is enough.
MOST_UNCLEAR_ROUNDS = 15


class PlanPart(NamedTuple):
    """One optimization of a plan; `ratio` is the speed-up of the plan by the part."""

    name: str
    word: str
    ratio: Ratio

    @property
    def is_proven(self) -> bool:
        """Return whether the plan without the part is slower by the part's required gain."""
        return self.ratio.verdict == "faster" and self.ratio.median >= least_gain(self.name)

    @property
    def is_clear(self) -> bool:
        """Return whether the part is decided: proven, refuted, or measured precisely."""
        is_too_little = self.ratio.high < least_gain(self.name)
        return self.is_proven or is_too_little or self.ratio.is_precise(PRECISE_PART)


def parts_of(whole: Candidate, comparison: Comparison) -> list[PlanPart]:
    """Return the measured parts of the plan, each with its ratio."""
    error = stopping.bonferroni_share(comparison.error, 2 * len(whole.values))
    records = {record.name: record for record in comparison.records if not record.failure}
    after, parts = records.get(whole.name), []
    for name in whole.values:
        before = records.get(whole.without(name).name)
        if before and after and (ratio := comparison.compared(before, after, error)):
            parts.append(PlanPart(name, whole.part(name).name, ratio))
    return parts


class Proof(Policy):
    """Continue until the first plan is precise, its rivals are dropped and its parts are clear.

    Rivals are dropped once they are clearly slower. A plan without one part is dropped once that
    part is proven or, if steps are long, once it is clearly slower. Then plans are checked, the
    best first, until one is right.
    """

    proves, checked, measures_memory = True, 2, False

    def __init__(self, plans: Sequence[Candidate], steps_are_long: bool) -> None:
        self._plans, self._whole = plans, plans[0]
        parts = () if steps_are_long else plans[0].without_each()
        self._staying = {plans[0].name, *(plan.name for plan in parts)}

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return clearly slower plans.

        At a planned test, also return plans without a proven part, and the whole plan if it gains
        nothing.
        """
        others = {row.name: row for row in racing[1:]}
        gone = [row for row in clearly_slower(racing) if row.name not in self._staying]
        if comparison and (whole := others.get(self._whole.name)):
            parts = [part for part in parts_of(self._whole, comparison) if part.is_proven]
            without = (self._whole.without(part.name).name for part in parts)
            gone += [others[name] for name in without if name in others]
            ratio = comparison.ratio(whole)
            if ratio and ratio.median <= 1 and ratio.pairs >= stopping.LEAST_PAIRS:
                gone.append(whole)
        return gone

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        others = {row.name: row for row in racing[1:]}
        if comparison is None or not others:
            return not others
        if (whole := others.get(self._whole.name)) is None:
            return super().is_over(racing, comparison)
        ratio = comparison.ratio(whole)
        if ratio is None or ratio.verdict == "too noisy":
            return ratio is not None and ratio.high < LEAST_WORTH_FINDING
        has_enough = len(racing[0].times_s) >= MOST_UNCLEAR_ROUNDS
        rivals = others.keys() - self._staying
        parts = parts_of(self._whole, comparison)
        open_parts = [part for part in parts if self._whole.without(part.name).name in others]
        is_clear = not rivals and all(part.is_clear for part in open_parts)
        of_processes = statistics.NORMAL * statistics.PROCESSES * math.log(max(ratio.median, 1))
        precise = max(PRECISE_PLAN, of_processes)
        return (is_clear or has_enough) and ratio.is_precise(precise * (1 + has_enough))

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the best plan, then other plans until one is right."""
        timed = {plan.name: TimedPlan.of(comparison, plan) for plan in self._plans}
        gains = {name: one.gain(proven=True, checked=False) for name, one in timed.items()}
        while gains[(best := leader(self._plans, gains)).name] > 1:
            yield timed[best.name].record
            if timed[best.name].gain(proven=True) > 1:
                return
            gains[best.name] = 0.0
