"""What a part of a plan is worth: the whole against the same without it, round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from speedkit_jupyter import optimizations
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record, ratio_of
from speedkit_jupyter.measure.results.statistics import SAME, Ratio, bonferroni_share
from speedkit_jupyter.tuning.candidates import LOWERING, Candidate
from speedkit_jupyter.tuning.policies import WORTH_IT

# What seems to bring so much is no idle part, however few the rounds are that say it.
MUCH = 1.05


@dataclass(frozen=True)
class Part:
    """One optimization of a plan. `ratio` is how many times as fast the plan is with it as without
    it; None where that was not measured.
    """

    name: str
    word: str
    ratio: Ratio | None

    @property
    def is_proven(self) -> bool:
        """Whether leaving it out costs something, enough for what it costs itself."""
        return self.ratio is not None and self.ratio.low > 1 and self.ratio.median >= self.least

    @property
    def is_clear(self) -> bool:
        """Whether more rounds could change nothing: proven, or known to be worth too little."""
        return self.is_proven or (self.ratio is not None and self.ratio.high < self.least)

    @property
    def is_idle(self) -> bool:
        """Whether it is measured, not proven, and does not seem to bring much either."""
        return self.ratio is not None and not self.is_proven and self.ratio.median < MUCH

    @property
    def least(self) -> float:
        """What it has to bring."""
        return least(self.name)

    def rounds_needed(self) -> float:
        """Return about how many rounds make it clear; an interval shrinks with their root."""
        ratio = self.ratio
        if ratio is None:
            return math.inf
        if not ratio.is_bounded:
            return 2.0 * ratio.pairs
        half_width = math.log(ratio.high / ratio.low) / 2
        to_prove = math.log(ratio.median) if ratio.median >= self.least else 0.0
        target = max(to_prove, math.log(self.least / ratio.median))
        return ratio.pairs * (half_width / target) ** 2 if target > 0 else math.inf


def least(name: str) -> float:
    """Return what an optimization has to bring: more where it lowers precision or costs seconds."""
    return WORTH_IT if name in LOWERING or optimizations.named(name).costly else 1 + SAME


def pays(candidate: Candidate, values: Mapping[str, float], others: Sequence[Candidate]) -> bool:
    """Return whether it looks better than each plan that lacks some of its parts by what these
    have to bring; `values` by the plans' names.
    """
    return all(
        values[candidate.name]
        > values[plan.name] * max(map(least, candidate.values.keys() - plan.values))
        for plan in others
        if plan.values.items() < candidate.values.items()
    )


def without_each(whole: Candidate) -> list[Candidate]:
    """Return the whole without each of its parts: first those that need proof the most."""
    order = sorted(
        whole.values,
        key=lambda name: (name not in LOWERING, not optimizations.named(name).costly),
    )
    return [whole.without(name) for name in order if len(whole.values) > 1]


def parts(whole: Candidate, comparison: Comparison) -> list[Part]:
    """Return each part of the plan, by the rounds that have the plan with and without it."""
    error = bonferroni_share(comparison.error, 2 * len(whole.values))
    return [
        Part(name, whole.part(name).name, lead(comparison, whole.without(name), whole, error))
        for name in whole.values
    ]


def lead(
    comparison: Comparison, rest: Candidate, whole: Candidate, error: float | None = None
) -> Ratio | None:
    """Return how many times as fast the whole is as the rest; None where that is not known."""
    records: dict[str, Record] = {record.name: record for record in comparison.records}
    records.setdefault("baseline", comparison.baseline)
    before, after = records.get(rest.name), records.get(whole.name)
    if before is None or after is None or before.failure or after.failure:
        return None
    return ratio_of(before, after, error or bonferroni_share(comparison.error, 2))
