"""A remedy, measured: the step as it is beside the step as it would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from speedkit_jupyter.advice.advisor import loaders_of
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import BASELINE, Variant, variant
from speedkit_jupyter.support.exceptions import StepError


@dataclass(frozen=True)
class Advised:
    """What was advised last: opportunities by their numbers, and what makes their step again."""

    opportunities: list[Opportunity]
    step: Callable[[], Step]

    def benchmark(self, number: int, budget_s: float | None, command: str) -> Benchmark:
        """Of one of them. Raises StepError where there is none, or only the user can write it."""
        if not 1 <= number <= len(self.opportunities):
            raise StepError(f"%speedkit advise --try: there is no {number}: they go from 1 to "
                            f"{len(self.opportunities)}")  # fmt: skip
        one = self.opportunities[number - 1]
        if not (one.variant or one.trial):
            raise StepError(
                f"%speedkit advise --try: {number} has to be written by hand: {one.remedy}; "
                "%%speedbench --save NAME before and after says what it brought"
            )
        step = self.step()
        return Benchmark(step, [Variant(BASELINE), _variant(one, step)], budget_s, command=command)


def _variant(one: Opportunity, step: Step) -> Variant:
    if one.trial is None:
        return variant(one.variant)
    subject = Subject(step.models, step.optimizers, loaders_of(step))
    return Variant(one.rule, around=partial(one.trial, subject))
