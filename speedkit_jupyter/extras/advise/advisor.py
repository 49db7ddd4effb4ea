"""Profile a step, observe one more call of the step, and apply every rule."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise.advice import Advice, Opportunity, Subject, ranked
from speedkit_jupyter.extras.advise.rules import ALWAYS, RULES
from speedkit_jupyter.extras.advise.situation import Situation, observed
from speedkit_jupyter.extras.profile.costs import names_of
from speedkit_jupyter.extras.profile.profiler import IsolatedStep, Profiler
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Progress, drained
from speedkit_jupyter.search import learning
from speedkit_jupyter.step.step import Step, over_batches, step_of
from speedkit_jupyter.step.variants import BASELINE, Variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code

# Share of the budget that a rule may spend on comparing two model calls, after the profile.
TRIALS = 0.1


class Advisor:
    """Find opportunities: exhaust `run()`, then call `result()`. `subject` is the step's name."""

    def __init__(self, profiler: Profiler, subject: str = "") -> None:
        self._profiler = profiler
        self._advice = Advice(profiler.result(), subject=subject)
        self._trial_s = TRIALS * profiler.budget_s
        self.has_results = profiler.has_results

    def result(self) -> Advice:
        return self._advice

    def run(self) -> Generator[Progress, None, None]:
        """Profile the step, apply the rules and restore state; yield between groups of calls."""
        with self._profiler.guarded() as guard:
            step = yield from self._profiler.measured(guard, self._trial_s)
            yield Progress(1.0, "one more call, observed")
            step.settle()
            situation = self._situation(step)
            for name, rule in RULES.items():
                try:
                    found = [replace(one, rule=name) for one in rule(situation)]
                except Exception as error:
                    self._advice.skipped[name] = in_a_line(error)
                else:
                    situation.found += found
            self._advice.opportunities = ranked(situation.found, ALWAYS)
            with suppress(SpeedKitError):  # `%speedkit apply` reports a damaged store of plans
                self._advice.proven = self._proven()

    def _situation(self, isolated: IsolatedStep) -> Situation:
        step = self._profiler.step
        call = observed(isolated.call, Subject(step.models).parameters)
        called = step.expressions([draws.loader for draws in call.draws.values()])
        modules, _ = names_of(step)
        return Situation(
            profile=self._profiler.result(), observed=call,
            cores=Hardware.current().cpu.usable_cores, device=isolated.device,
            subject=Subject(step.models, step.optimizers, loaders_of(step)),
            names=dict(zip(call.draws, called, strict=True)) | modules, settle=isolated.settle,
            trial_s=self._trial_s,
        )  # fmt: skip

    def _proven(self) -> str:
        """Return a sentence on the plan in force or the result of tuning; empty without either."""
        step = self._profiler.step
        if not step.models:
            return ""
        if any(applied_to(model) is not None for model in step.models):
            return "A plan of switches is in force: the step was measured with it."
        learned = learning.newest(step.models, step.optimizers, Hardware.current())
        if learned is None:
            return ""
        if not learned.value["values"]:
            return "Tuning proved no plan of switches faster for this step."
        called = ",".join(filter(None, step.expressions(step.models)))
        apply = f"%speedkit apply {called}".rstrip()
        plan = f"{learned.value['name']} {learning.gain(learned.value)}"
        return f"Tuning has proven a plan for this step: {plan}. `{apply}` applies it."


def loaders_of(step: Step) -> list[DataLoader[Any]]:
    return [value for value in step.walk().found.values() if is_a(value, DataLoader)]


@dataclass(frozen=True)
class Advised:
    """The last advice, whose opportunities can be tried by number or rule.

    `step` creates the step again; `asked` has the given names of step, model and loader.
    """

    opportunities: list[Opportunity]
    step: Callable[[], Step]
    asked: tuple[str | None, ...] = ()

    def benchmark(self, wanted: str, budget_s: float | None, command: str) -> Benchmark:
        """Return the benchmark of one opportunity, given by number or rule.

        Raises StepError if the opportunity is unknown, or its remedy must be written by hand.
        """
        numbered = [(str(number), one) for number, one in enumerate(self.opportunities, 1)]
        named = {one.rule: one for one in reversed(self.opportunities)}
        if (one := (named | dict(numbered)).get(wanted)) is None:
            known = ", ".join(f"{number} or {one.rule}" for number, one in numbered)
            there = f"there is no {wanted}: {known}" if known else "no reason was found to try"
            raise StepError(f"%speedkit advise --try: {there}")
        if one.trial is None:
            raise StepError(
                f"%speedkit advise --try: {wanted} must be written by hand: {one.remedy}; "
                "%%speedbench before and after measures its gain"
            )
        step = self.step()
        subject = Subject(step.models, step.optimizers, loaders_of(step))
        if step.optimizers:
            step = replace(step, unread=frozenset(map(id, subject.idle)))
        tried = Variant(one.rule, around=partial(one.trial, subject))
        return Benchmark(step, [Variant(BASELINE), tried], budget_s, command=command)


@interruptible_in_users_code
def advise(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loader: DataLoader[Any] | None = None,
    budget_s: float | None = None,
) -> Advice:
    """Find opportunities to make `step()` faster, and undo the changes that its calls make.

    The step is profiled as by `profile`, one more call is observed, and each rule is applied.

    Args:
        step: a function without arguments, or a function of a batch of the `loader`, which is then
            called for all batches of an epoch.
        model: the models of the step (default: all that the function's code reaches).
        optimizer: the optimizers of the step (default: all that the function's code reaches).
        loader: the DataLoader with the batches that `step` takes; unused if `step` takes none.
        budget_s: seconds in all, without compiling (default: 10).

    Returns:
        An Advice. Each of its `opportunities` has evidence, the expected gain of the whole step,
        the code to write, and the risk of the change.

    Raises:
        StepError, ArgumentError: the step can't be measured, or an argument is invalid.

    Example::

        advise(train_step).opportunities
    """
    budget_s = arguments.seconds("budget_s", budget_s)
    name = getattr(step, "__name__", "step")
    step = over_batches(step, loader, name, "give loader=…")
    measured = step_of(step, model, optimizer)
    return drained(Advisor(Profiler(measured, budget_s, f"advise({name})"), name))
