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

    def benchmark(self, wanted: int | str, budget_s: float | None, command: str) -> Benchmark:
        """Return the benchmark of one, by its number or rule. Raises StepError where there is none,
        or only the user can write it.
        """
        one = self._find(wanted)
        if not (one.variant or one.trial):
            raise StepError(
                f"%speedkit advise --try: {wanted} has to be written by hand: {one.remedy}; "
                "%%speedbench --save NAME before and after says what it brought"
            )
        step = self.step()
        if one.unread is not None:
            step.unread = frozenset(map(id, one.unread(_subject(step))))
        return Benchmark(step, [Variant(BASELINE), _variant(one, step)], budget_s, command=command)

    def _find(self, wanted: int | str) -> Opportunity:
        rules = [one.rule for one in self.opportunities]
        if wanted in rules:
            return self.opportunities[rules.index(str(wanted))]
        if isinstance(wanted, int) and 1 <= wanted <= len(rules):
            return self.opportunities[wanted - 1]
        known = ", ".join(f"{number} or {rule}" for number, rule in enumerate(rules, 1))
        raise StepError(f"%speedkit advise --try: there is no {wanted}: {known or 'nothing found'}")


def _variant(one: Opportunity, step: Step) -> Variant:
    if one.trial is None:
        return variant(one.variant)
    return Variant(one.rule, around=partial(one.trial, _subject(step)))


def _subject(step: Step) -> Subject:
    return Subject(step.models, step.optimizers, loaders_of(step))
