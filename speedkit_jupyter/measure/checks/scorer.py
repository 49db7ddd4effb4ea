"""Asks the user's function for its number, under one variant after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from speedkit_jupyter.measure.checks.scores import Score, Scored
from speedkit_jupyter.measure.checks.trials import is_compiled
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.support import interrupts
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError

# Of torch's error where a backward pass meets a result that recorded nothing.
NEEDS_GRADIENTS = "require grad"


class Scorer:
    """The number of the model as it is comes first; raises StepError where it can't be used.

    No gradients are recorded, as where a model is used, unless the function needs them. `took_s`
    are the seconds of all that, none of them the budget's.
    """

    def __init__(self, accuracy: NamedAccuracy, step: Step) -> None:
        self.accuracy = accuracy
        self._call = accuracy.bound(step.models)
        self._records_gradients = False
        self._before: Score | None = None
        self.took_s = 0.0

    def of_baseline(self, runner: Runner, start: Snapshot, budget: Budget) -> Iterator[Progress]:
        """For its record; from the state `start` and back to it, on top of the budget."""
        __tracebackhide__ = True
        yield self._ahead(runner)
        with self._on_top(start, budget), runner.applied():
            self._before = self.before(runner)
        runner.record.score = self._scored(self._before, self._before)

    def of_others(
        self, runners: Sequence[Runner], start: Snapshot, budget: Budget
    ) -> Iterator[Progress]:
        """Likewise; what is wrong is not asked, which may take long."""
        __tracebackhide__ = True
        for runner in runners:
            accuracy = runner.record.accuracy
            if self._before is None or (accuracy is not None and accuracy.verdict == "wrong"):
                continue
            yield self._ahead(runner)
            with self._on_top(start, budget), runner.applied():
                runner.record.score = self.after(runner, self._before)

    def before(self, runner: Runner) -> Score:
        """Under the baseline, which the function has to use and to leave as it is.

        What it changes beside the model is the caller's to put back.
        """
        name, step = self.accuracy.name, runner.step
        held, called, compiled = step.state(), set[int](), is_compiled(runner)
        with nullcontext() if compiled else _noting(called):
            try:
                score = self._score(runner)
            except StepError as error:
                if NEEDS_GRADIENTS not in str(error):
                    raise
                self._records_gradients = True
                held.restore()
                score = self._score(runner)
        known = {id(part) for model in step.models for part in model.modules()}
        if not compiled and not known & called:
            raise StepError(
                f"{name} calls no model that the step uses, so no plan changes what it gives"
            )
        if changed := _changed(step, {id(tensor) for tensor in held.overwritten()}):
            raise StepError(f"{name} changes the model: {changed}")
        return score

    def after(self, runner: Runner, before: Score) -> Scored:
        """Under a plan; an error there is the plan's failure."""
        try:
            return self._scored(before, self._score(runner))
        except Exception as error:
            return self._scored(before, None, str(error))

    def _scored(self, before: Score, after: Score | None, failure: str = "") -> Scored:
        """With what the user has said about it."""
        asked = self.accuracy
        return Scored(asked.name, before, after, asked.better, asked.allowed, failure=failure)

    def _score(self, runner: Runner) -> Score:
        """Raises StepError in one line for whatever the function raises."""
        try:
            given = self._ask(runner)
        except SpeedKitError:
            raise
        except Exception as error:
            raise StepError(f"{self.accuracy.name} raises {_line(error)}") from None
        return self.accuracy.score(given)

    def _ask(self, runner: Runner) -> object:
        import torch

        lowered = [c for c in runner.contexts if c.plan["precision"].active]
        runner.step.rewind()
        with (
            torch.set_grad_enabled(self._records_gradients),
            lowered[0].autocast() if lowered else nullcontext(),
        ):
            return interrupts.in_a_window(self._call)

    @contextmanager
    def _on_top(self, start: Snapshot, budget: Budget) -> Iterator[None]:
        begun_s = clock.now()
        start.restore()  # before the plan is applied: settings are part of the state
        try:
            yield
        finally:
            start.restore()
            took_s = clock.now() - begun_s
            self.took_s += took_s
            budget.exclude(took_s)

    def _ahead(self, runner: Runner) -> Progress:
        return Progress(0.0, f"{self.accuracy.name} of {runner.record.name}")


@contextmanager
def _noting(called: set[int]) -> Iterator[None]:
    """Which modules are called in the block."""
    from torch.nn import Module

    def noting(call: Any) -> Callable[..., Any]:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(id(module))
            return call(module, *args, **kwargs)

        return noted

    with patched(Module, "__call__", noting):
        yield


def _changed(step: Step, overwritten: set[int]) -> str:
    """The first parameter, or statistic of a norm, that is another; empty where none is.

    Other buffers may be what a model keeps between its calls.
    """
    for model in step.models:
        for name, parameter in model.named_parameters():
            if id(parameter) in overwritten:
                return f"{name} is another after it; it has to measure, and not to train"
        for path, part in model.named_modules():
            keeps_statistics = getattr(part, "track_running_stats", False) is True
            for name, buffer in part.named_buffers(recurse=False) if keeps_statistics else ():
                if id(buffer) in overwritten:
                    where = ".".join(filter(None, (path, name)))
                    return f"{where} is another after it; is model.eval() missing?"
    return ""


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.160}".rstrip(": ")
