"""Profiles a step, watches one more call of it, asks every rule, and tries what it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.advice import Advice, ranked
from speedkit_jupyter.advice.code import Code
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules import RULES
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.advice.watched import watched
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.statistics import paired_ratio
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import plan_applied_to
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.profiling.operators import names_of
from speedkit_jupyter.profiling.profiler import Isolated, Profiler
from speedkit_jupyter.support.database import Learned
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.tuning import learning

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# A trial takes this many pairs of calls at most.
PAIRS = 40


class Advisor:
    """Drain `run()`, then read `result()`.

    `profiler` is that of the step; `names` what the user calls things, by their ids; `loaders`
    those that the step's code hides. Raises StepError where the step can't be measured.
    """

    def __init__(
        self,
        profiler: Profiler,
        names: Mapping[int, str] = MappingProxyType({}),
        loaders: Sequence[DataLoader[Any]] = (),
        subject: str = "",
    ) -> None:
        self._profiler, self._names, self._loaders = profiler, names, loaders
        self._advice = Advice(profiler.result(), subject=subject)
        profiler.afterwards = self._look

    @property
    def step(self) -> Step:
        """Return what the advice is about."""
        return self._profiler.step

    def result(self) -> Advice:
        """Return what is known so far."""
        return self._advice

    def has_results(self) -> bool:
        """Return whether there is anything to show already."""
        return self._profiler.has_results()

    def run(self) -> Generator[Progress, None, None]:
        """Measure and look; yield after every call."""
        __tracebackhide__ = True
        yield from self._profiler.run()

    def _look(self, isolated: Isolated) -> None:
        """Ask the rules while the step is isolated, so that they may try what they think of."""
        __tracebackhide__ = True
        isolated.settle()
        seen = self._situation(isolated)
        found: list[Opportunity] = []
        for rule in RULES:
            seen.said = found
            try:
                found += [replace(one, rule=rule.name) for one in rule.find(seen)]
            except Exception as error:
                line = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._advice.skipped[rule.name] = line
        always = frozenset(rule.name for rule in RULES if rule.saves_memory)
        self._advice.opportunities = ranked(_tried(found, isolated, seen.subject), always)

    def _situation(self, isolated: Isolated) -> Situation:
        __tracebackhide__ = True
        step, hardware = self.step, Hardware.current()
        subject = Subject(step.models, step.optimizers)
        what = watched(isolated.call, subject.parameters)
        known = [*(self._loaders or loaders_of(step))]
        ids = {id(one) for one in known}
        # As the profile's modules are called, whose shares are looked up by these names.
        names, _ = names_of(step.models, self._profiler.called)
        facts = [Facts.read(model, step.holders(model)) for model in step.models]
        return Situation(
            profile=self._profiler.result(),
            watched=what,
            code=Code(what.ran),
            hardware=hardware,
            device=isolated.device,
            models=step.models,
            optimizers=step.optimizers,
            loaders=[*known, *(one for one in what.loaders.values() if id(one) not in ids)],
            lasting=len(known),
            plans=[plan(hardware=hardware, facts=one) for one in facts],
            learned=_learned(step, hardware),
            in_force=_in_force(step),
            names={**self._names, **names},
            settle=isolated.settle,
            affords=isolated.affords,
        )


def _tried(
    found: Iterable[Opportunity], isolated: Isolated, subject: Subject
) -> Iterator[Opportunity]:
    """Try what can be tried at once, in turn with the step as it is, while there is time.

    What shows that the step gains less than was expected lowers the range: down to nothing.
    """
    __tracebackhide__ = True
    begun_s = clock.now()
    for one in found:
        if one.trial is None or one.part == "data":  # workers take long until they work
            yield one
            continue
        most = math.inf
        with suppress(Exception):  # what the step does not allow is not refuted by that
            most = _most(isolated, partial(one.trial, subject), begun_s)
        yield replace(one, gain=one.gain.within(max(most, 1.0)))
    isolated.settle()


def _most(isolated: Isolated, trial: Callable[[], Any], begun_s: float) -> float:
    """Return the upper end of the measured speed-up's interval; infinite where time is short."""
    plain_s, tried_s = list[float](), list[float]()
    while len(plain_s) <= PAIRS:
        pair_s = sum(plain_s[-1:] + tried_s[-1:])
        if not isolated.affords(clock.now() - begun_s + 2 * pair_s):
            break
        isolated.settle()
        plain_s.append(clock.timed(isolated.call, isolated.device))
        isolated.settle()
        with trial():
            tried_s.append(clock.timed(isolated.call, isolated.device))
    # The first calls warm up.
    return paired_ratio(plain_s[1:], tried_s[1:]).high if len(plain_s) > 1 else math.inf


def _in_force(step: Step) -> frozenset[str]:
    """Return what of the catalog is applied to a model of the step already."""
    plans = [found for model in step.models if (found := plan_applied_to(model)) is not None]
    return frozenset(decision.name for one in plans for decision in one if decision.active)


def _learned(step: Step, hardware: Hardware) -> Learned | None:
    try:
        return learning.newest(step.models, step.optimizers, hardware) if step.models else None
    except SpeedKitError:  # a damaged store is told of where plans are asked for
        return None


def loaders_of(step: Step) -> list[DataLoader[Any]]:
    """Return torch's that the step's code reaches, in the order in which it does."""
    from torch.utils.data import DataLoader

    return [value for value in step.walk().found.values() if is_a(value, DataLoader)]
