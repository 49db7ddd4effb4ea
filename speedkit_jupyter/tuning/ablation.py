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
from speedkit_jupyter.tuning.early_stopping import WORTH_IT

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

    def describe(self) -> str:
        """What leaving it out costs, in numbers."""
        if self.ratio is None:
            return "not measured alone"
        return f"with it the plan is {self.ratio} as fast as without"

    @property
    def is_proven(self) -> bool:
        """Whether leaving it out costs something, enough for what it costs itself."""
        return self.ratio is not None and self.ratio.low > 1 and self.ratio.median >= self.least

    @property
    def is_clear(self) -> bool:
        """Whether more rounds could change nothing: proven, or known to be worth too little."""
        return self.is_proven or (self.ratio is not None and self.ratio.high < self.least)

    def needed(self) -> float:
        """About how many rounds would make it clear; an interval shrinks with their root."""
        ratio = self.ratio
        if ratio is None:
            return math.inf
        if not ratio.is_bounded:
            return 2.0 * ratio.pairs
        half_width = math.log(ratio.high / ratio.low) / 2
        to_prove = math.log(ratio.median) if ratio.median >= self.least else 0.0
        to_disprove = math.log(self.least / ratio.median)
        target = max(to_prove, to_disprove)
        return ratio.pairs * (half_width / target) ** 2 if target > 0 else math.inf

    @property
    def least(self) -> float:
        """What it has to bring."""
        return least(self.name)


def least(name: str) -> float:
    """What an optimization has to bring: more where it lowers precision or takes seconds before."""
    return WORTH_IT if name in LOWERING or optimizations.named(name).costly else 1 + SAME


def pays(candidate: Candidate, values: Mapping[str, float], others: Sequence[Candidate]) -> bool:
    """Whether it looks better than each plan that lacks some of its parts by what these have to
    bring; `values` by the plans' names.
    """
    return all(
        values[candidate.name]
        > values[plan.name] * max(map(least, candidate.values.keys() - plan.values))
        for plan in others
        if plan.values.items() < candidate.values.items()
    )


def plans(whole: Candidate) -> list[Candidate]:
    """The whole without each of its parts: first those that need proof the most."""
    order = sorted(
        whole.values,
        key=lambda name: (name not in LOWERING, not optimizations.named(name).costly),
    )
    return [whole.without(name) for name in order if len(whole.values) > 1]


def parts(whole: Candidate, comparison: Comparison) -> list[Part]:
    """Each part of the plan, by the rounds that have the plan with and without it."""
    records = {record.name: record for record in comparison.records}
    records.setdefault("baseline", comparison.baseline)
    error = bonferroni_share(comparison.error, 2 * len(whole.values))
    return [
        Part(
            name,
            whole.part(name).name,
            _ratio(records, whole.without(name).name, whole.name, error),
        )
        for name in whole.values
    ]


def _ratio(records: Mapping[str, Record], without: str, whole: str, error: float) -> Ratio | None:
    rest, plan = records.get(without), records.get(whole)
    if rest is None or plan is None or rest.failure or plan.failure:
        return None
    return ratio_of(rest, plan, error)


def lead(comparison: Comparison, without: Candidate, whole: Candidate) -> Ratio | None:
    """How many times as fast the whole is as what is left of it."""
    records = {record.name: record for record in comparison.records}
    return _ratio(records, without.name, whole.name, bonferroni_share(comparison.error, 2))


def seems_much(ratio: Ratio | None) -> bool:
    """Whether a plan would lose by it, as far as the rounds can tell."""
    return ratio is not None and ratio.median >= MUCH


def unproven(parts: Sequence[Part]) -> list[str]:
    """The names of the parts that were measured and are not proven, what brings least first."""
    measured = [
        (part.ratio.median, part.name) for part in parts if part.ratio and not part.is_proven
    ]
    return [name for _, name in sorted(measured)]
