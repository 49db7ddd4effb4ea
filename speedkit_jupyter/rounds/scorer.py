"""Asks the user's function for its number, under one variant after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from speedkit_jupyter.right.named_accuracy import NamedAccuracy, Scored
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.examination import is_compiled
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.repeats import StepWork, counted
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.torchglue import interrupts

# Of torch's error where a backward pass meets a result that recorded nothing.
NEEDS_GRADIENTS = "require grad"


class Scorer:
    """Raises StepError where the model as it is has no number that can be used."""

    def __init__(self, accuracy: NamedAccuracy, step: Step) -> None:
        self.accuracy = accuracy
        self._call = accuracy.bound(step.models)
        self.before: float | None = None  # the baseline's number

    def scores(
        self, runners: Sequence[Runner], start: Snapshot, budget: Budget
    ) -> Iterator[Progress]:
        """Write the numbers into the records, the baseline's first; their time is excluded."""
        for runner in runners:
            accuracy = runner.record.accuracy
            if accuracy is not None and accuracy.verdict == "wrong":
                continue
            yield Progress(0.0, f"{self.accuracy.name} of {runner.record.name}")
            begun_s = clock.now()
            start.restore()  # before the plan is applied: settings are part of the state
            try:
                with runner.applied():
                    runner.record.score = self.scored(runner)
            finally:
                start.restore()
                budget.exclude(clock.now() - begun_s)

    def scored(self, runner: Runner) -> Scored:
        """Return the baseline's number and this one; an error under a plan is its failure."""
        named, failure = self.accuracy, ""
        if self.before is None:
            self.before = after = self._first(runner)
        else:
            try:
                after = self._score(runner)
            except Exception as error:
                after, failure = None, str(error)
        return Scored(named.name, self.before, after, named.better, named.allowed, failure=failure)

    def _first(self, runner: Runner) -> float:
        """Return the baseline's number; the function must use the model and leave it as it is."""
        name, step = self.accuracy.name, runner.step
        held, compiled = step.state(), is_compiled(runner)
        with nullcontext(StepWork(calls=1)) if compiled else counted(step.models) as work:
            score = self._score(runner)
        if not work.calls:
            raise StepError(
                f"{name} calls no model that the step uses, so no plan changes what it gives"
            )
        if changed := _changed(step, {id(tensor) for tensor in held.overwritten()}):
            raise StepError(f"{name} changes the model: {changed}")
        return score

    def _score(self, runner: Runner) -> float:
        """Raises StepError in one line for whatever the function raises."""
        lowered = [c for c in runner.contexts if c.plan["precision"].active]
        autocast = lowered[0].autocast() if lowered else nullcontext()
        for records_gradients in (False, True):  # only if the function needs them
            runner.step.rewind()
            try:
                with torch.set_grad_enabled(records_gradients), autocast:
                    return self.accuracy.score(interrupts.in_a_window(self._call))
            except SpeedKitError:
                raise
            except Exception as error:
                line = in_a_line(error)
            if NEEDS_GRADIENTS not in line:
                break
        raise StepError(f"{self.accuracy.name} raises {line}")


def _changed(step: Step, overwritten: set[int]) -> str:
    """Say which parameter, or statistic of a norm, was written to; empty without one."""
    for model in step.models:
        parameters = dict(model.named_parameters())
        for name, tensor in (parameters | dict(model.named_buffers())).items():
            part = model.get_submodule(name.rpartition(".")[0])
            counts = name in parameters or getattr(part, "track_running_stats", False) is True
            if counts and id(tensor) in overwritten:
                return f"{name} is another after it; is model.eval() missing, or does it train?"
    return ""
