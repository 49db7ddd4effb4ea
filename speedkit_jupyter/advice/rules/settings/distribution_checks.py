"""Distributions that check their arguments in every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.04
# Of a distribution without checks so much of that time is left at the most.
TIMES = (2.0, 20.0)


class DistributionChecks(Rule):
    """`torch.distributions` looks at every argument and every value, unless it is told not to."""

    name: ClassVar[str] = "distribution_checks"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """All distributions of a step together."""
        watched = seen.watched
        taken = min(watched.checks_s / (seen.step_s * seen.steps), 0.95)
        if taken < LEAST:
            return
        yield Opportunity(
            self.name,
            "switch off the argument checks of torch.distributions",
            f"{watched.checks / seen.steps:.3g} checks of arguments and values in a step: "
            f"{share(taken)} of the step",
            amdahl(taken, *TIMES),
            "torch.distributions.Distribution.set_default_validate_args(False), once the code is "
            "right",
            "a wrong argument, as NaN, is no longer reported",
            trial=_off,
            share=taken,
        )


@contextmanager
def _off(_: Subject) -> Iterator[None]:
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
