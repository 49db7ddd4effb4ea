"""Profiles a step, watches one more call of it, asks every rule, and tries what it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.advise.advice import Advice, Opportunity, Subject, ranked
from speedkit_jupyter.extras.advise.code import StepCode
from speedkit_jupyter.extras.advise.observed_call import watched
from speedkit_jupyter.extras.advise.rules import ALWAYS, RULES
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.profile.operators import names_of
from speedkit_jupyter.extras.profile.profiler import Isolated, Profiler, profiler_of
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.statistics import paired_ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.step.over_batches import over_batches
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import BASELINE, Variant, variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.interrupts import interruptible

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
        self.run, self.has_results = profiler.run, profiler.has_results

    def result(self) -> Advice:
        return self._advice

    def _look(self, isolated: Isolated) -> None:
        """Ask the rules while the step is isolated, so that they may try what they think of."""
        isolated.settle()
        seen = self._situation(isolated)
        found: list[Opportunity] = []
        for rule in RULES:
            seen.said = found
            try:
                found += [replace(one, rule=rule.__name__) for one in rule(seen)]
            except Exception as error:
                self._advice.skipped[rule.__name__] = in_a_line(error)
        self._advice.opportunities = ranked(_tried(found, isolated, seen.subject), ALWAYS)

    def _situation(self, isolated: Isolated) -> Situation:
        step, hardware = self._profiler.step, Hardware.current()
        what = watched(isolated.call, Subject(step.models).parameters)
        known = [*(self._loaders or loaders_of(step))]
        ids = {id(one) for one in known}
        # As the profile's modules are called, whose shares are looked up by these names.
        names, _ = names_of(step.models, self._profiler.called)
        facts = [Facts.read(model, step.holders(model)) for model in step.models]
        contexts = [found for model in step.models if (found := applied_to(model)) is not None]
        applied = [context.own_plan for context in contexts]
        is_tuned = False
        with suppress(SpeedKitError):  # a damaged store is told of where plans are asked for
            newest = learning.newest(step.models, step.optimizers, hardware)
            is_tuned = bool(step.models) and newest is not None
        return Situation(
            profile=self._profiler.result(),
            watched=what,
            code=StepCode(what.ran),
            hardware=hardware,
            device=isolated.device,
            models=step.models,
            optimizers=step.optimizers,
            loaders=[*known, *(one for one in what.loaders.values() if id(one) not in ids)],
            lasting=len(known),
            plans=[plan(hardware=hardware, facts=one) for one in facts],
            is_tuned=is_tuned,
            in_force=frozenset(one.name for plan in applied for one in plan if one.active),
            names={**self._names, **names},
            settle=isolated.settle,
            affords=isolated.affords,
        )


def _tried(
    found: Iterable[Opportunity], isolated: Isolated, subject: Subject
) -> Iterator[Opportunity]:
    """Try what can be tried at once, in turn with the step as it is, while there is time.

    A trial lowers what is expected to the upper end of its interval, down to nothing.
    """
    begun_s = clock.now()
    for one in found:
        most = math.inf
        if one.trial is not None and one.part != "data":  # workers take long until they work
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
        plain_s.append(isolated.timed_s())
        isolated.settle()
        with trial():
            tried_s.append(isolated.timed_s())
    # The first calls warm up.
    return paired_ratio(plain_s[1:], tried_s[1:]).high if len(plain_s) > 1 else math.inf


def loaders_of(step: Step) -> list[DataLoader[Any]]:
    """Return torch's that the step's code reaches, in the order in which it does."""
    return [value for value in step.walk().found.values() if is_a(value, DataLoader)]


@dataclass(frozen=True)
class Advised:
    """What was advised last, by number; `step` makes the step again, and `asked` are the names of
    the function, the model and the loader that it was about.
    """

    opportunities: list[Opportunity]
    step: Callable[[], Step]
    asked: tuple[str | None, ...] = ()

    def benchmark(self, wanted: int | str, budget_s: float | None, command: str) -> Benchmark:
        """Return the benchmark of one, by its number or rule: the step as it is beside the step as
        it would be. Raises StepError where there is none, or only the user can write it.
        """
        rules = [one.rule for one in self.opportunities]
        if wanted not in [*range(1, len(rules) + 1), *rules]:
            known = ", ".join(f"{number} or {rule}" for number, rule in enumerate(rules, 1))
            raise StepError(
                f"%speedkit advise --try: there is no {wanted}: {known or 'nothing found'}"
            )
        at = wanted - 1 if isinstance(wanted, int) else rules.index(wanted)
        one = self.opportunities[at]
        if not (one.variant or one.trial):
            raise StepError(
                f"%speedkit advise --try: {wanted} has to be written by hand: {one.remedy}; "
                "%%speedbench --save NAME before and after says what it brought"
            )
        step = self.step()
        subject = Subject(step.models, step.optimizers, loaders_of(step))
        if one.unread is not None:
            step.unread = frozenset(map(id, one.unread(subject)))
        tried = variant(one.variant) if one.trial is None else Variant(
            one.rule, around=partial(one.trial, subject)
        )  # fmt: skip
        return Benchmark(step, [Variant(BASELINE), tried], budget_s, command=command)


@interruptible
def advise(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loader: DataLoader[Any] | None = None,
    budget_s: float | None = None,
) -> Advice:
    """Return what would make `step()` faster: opportunities with their evidence, the expected
    speed-up of the whole step, the risk, and what to write.

    A step that takes a batch needs the `loader` that gives it: a call is an epoch then. It is
    profiled for `budget_s` seconds (10 without it) as `profile` does, one more call is watched, and
    every rule is asked. Models, optimizers and loaders that are not given are those that the
    function's code reaches. Nothing is changed. Raises StepError where the step can't be measured.
    """
    budget_s = arguments.seconds("budget_s", budget_s)
    name = getattr(step, "__name__", "step")
    step = over_batches(step, loader, name, "give loader=…")
    profiler = profiler_of(step, model, optimizer, budget_s, f"advise({name})")
    advisor = Advisor(profiler, loaders=[] if loader is None else [loader], subject=name)
    for _ in advisor.run():
        pass
    return advisor.result()
