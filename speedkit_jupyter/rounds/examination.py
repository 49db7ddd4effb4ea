"""Single, untimed steps of variants: their accuracy, their memory, and the user's own number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.properties import calls
from speedkit_jupyter.right import reference
from speedkit_jupyter.right.judge import Accuracy, Evidence
from speedkit_jupyter.right.named_accuracy import NamedAccuracy, Scored
from speedkit_jupyter.right.observer import Key, Look, ObservedRun
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.runner import MOST_OVERFLOWS, Pool, Runner
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.watching import StepWork, counted
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.torchglue import confinement, interrupts
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD
from speedkit_jupyter.torchglue.storage import is_plain

Surrounding = Callable[[], AbstractContextManager[object]]


def is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles: such code draws its own numbers."""
    parts = [part for model in runner.step.models for part in model.modules()]
    by_user = any(calls.is_compiled(part) or hasattr(part, COMPILED_CHILD) for part in parts)
    return runner.record.is_compiled or by_user


class Examination:
    """Steps of working variants. A variant that raises becomes a row with its error.

    All are judged by the trace of the first.
    """

    def __init__(self, runners: Sequence[Runner], pool: Pool) -> None:
        self._runners, self._first = runners, runners[0]
        self._start, self._judge = pool.guard.state, pool.judge
        self.dropout_off = False  # while accuracy was checked

    def check(self, runner: Runner) -> None:
        """Note the accuracy of a variant in its record, after its rounds."""
        if not self._judge.baseline.ends:
            self._start.restore()
            self._gather()
        judge, record = self._judge, runner.record
        self._first.record.accuracy = judge.verdict(judge.baseline, self._first.precision)
        precision = judge.judged_in(runner.precision)
        add_control = partial(self._add_control, precision, runner)
        if not judge.void and precision != "fp32" and precision not in judge.controls:
            add_control()
        try:
            for _ in range(MOST_OVERFLOWS):
                before = runner.scale()
                run = self._run(runner)
                if not runner.scale() < before:  # its GradScaler skipped no step
                    break
        except Exception as error:
            runner.fail(error)
            return
        if record.is_other_model(self._first.record):
            record.accuracy = judge.distance(run, runner.precision)
            return
        every = partial(add_control, calls=len(judge.baseline.ends))
        # Six controls decide about a few numbers: of one, as a loss, a control may be near by
        # chance.
        evidence: list[Evidence] = [every, self._run_again, *[partial(every, most=6)] * 4]
        accuracy = judge.verdict(run, runner.precision, evidence)
        record.accuracy = self._unless_random(runner, accuracy)

    def _unless_random(self, runner: Runner, accuracy: Accuracy) -> Accuracy:
        """Return "not checked" where a variant may differ by its random numbers alone."""
        drawn = self._judge.drawn
        if accuracy.verdict != "wrong" or not drawn:
            return accuracy
        plans = {d.name for one in runner.contexts for d in one.plan if d.active}
        steps_only = plans == {"fused_optimizer"}  # changes the optimizer's step alone
        inside = [] if steps_only else sorted(filter(reference.draws_inside, drawn))
        if is_compiled(runner):
            why = "the step draws random numbers; compiled code draws others"
        elif inside:
            why = f"the step draws random numbers inside of {', '.join(inside)}; kernels differ"
        else:
            return accuracy
        return replace(accuracy, verdict="not checked", reason=f"{why} ({accuracy.reason})")

    def _run(
        self,
        runner: Runner,
        *around: Surrounding,
        calls: int = 0,
        trace: dict[Key, Look] | None = None,
        **options: Any,
    ) -> ObservedRun:
        """Compare some calls of the step, from the user's state, with the trace."""
        judge, drawn = self._judge, set[str]()
        replays = judge.drawn != set() and not is_compiled(runner)
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                without_dropout = reference.without_dropout(runner.step.models)
                self.dropout_off = stack.enter_context(without_dropout)
                for surrounding in around:
                    stack.enter_context(surrounding())
                stack.enter_context(reference.replayed(drawn) if replays else nullcontext())
                calls = calls or len(judge.baseline.ends)
                # A second call starts from the state (say, a cache) that the first call left.
                calls = calls or (2 if self._first.facts.leaves else 1)
                found = runner.observed(judge.trace if trace is None else trace, calls, **options)
        finally:
            self._start.restore()
        if replays:
            judge.note_drawn(drawn)
        return found

    def _gather(self) -> None:
        """Run the step in float64, and the baseline."""
        first, judge, models = self._first, self._judge, self._first.step.models
        held = reference.parameters_of([*models, *first.step.optimizers])
        trace: dict[Key, Look] = {}
        with confinement.calls_noted(models) as reached:
            # An error inside its forward pass breaks a sharded model.
            can_run = all(map(is_plain, held))
            options: dict[str, Any] = {"extends": True, "stops_at_step": True, "trace": trace}
            found = self._plainly(True, **options) if can_run else None
        # Where a thread of Python calls the model, float64 would reach the model, not its input.
        if found is None or reached.in_pythons:
            trace.clear()
        covered = set(trace)
        with reference.noted_autocast() as entered, confinement.calls_noted(models) as reached:
            baseline = self._run(first, trace=trace, extends=True)
        lowered = reference.lowest(*entered, *reference.of_dtypes(p.dtype for p in held))
        judge.begin(trace, baseline, covered, lowered)
        if reached.only_elsewhere:
            judge.give_up(confinement.NOT_REACHED)
            return
        if not judge.follows():
            trace = {}
            judge.begin(trace, self._run(first, trace=trace, extends=True), set(), lowered)
        if not judge.own.rows:  # nothing else has shown that the step computes the same each time
            self._run_again()
        if not all(row.is_finite for row in judge.baseline.rows.values()):
            judge.give_up("the step itself gives numbers that are not finite")

    def _run_again(self) -> None:
        """Run the baseline again, to find results that differ between its own runs."""
        self._judge.note_unlike(self._run(self._first))

    def _add_control(self, precision: str, runner: Runner, calls: int = 1, most: int = 2) -> None:
        """Run one more control of this precision, up to `most`, of this many `calls`."""
        runs = self._judge.controls.setdefault(precision, [])
        if len(runs) < most:
            wide = bool(self._judge.own.rows) and self._judge.lowered != "fp32"
            around = partial(reference.rounded, precision, len(runs), runner.scale())
            # Led first: an optimizer's step in float64 takes as long as all else. Not every
            # optimizer passes over parameters without a gradient.
            led = self._plainly(wide, around, led=True, calls=calls)
            run = led or self._plainly(wide, around, calls=calls)
            runs += [] if run is None else [run]

    def _plainly(
        self,
        wide: bool,
        *around: Surrounding,
        stops_at_step: bool = False,
        led: bool = False,
        calls: int = 1,
        **options: Any,
    ) -> ObservedRun | None:
        """Run the first variant without compiled code and wrappers, and in float64 if `wide`.

        None where the code doesn't allow that, or a dispatch mode.
        """
        step, steps = self._first.step, not (stops_at_step or led)
        held: list[Any] = [*step.models, *step.optimizers, *step.bystanders]
        in_float64 = (partial(reference.in_float64, held, steps),) if wide else ()
        options |= {"stops_at_step": stops_at_step, "led": led, "ends_early": True}
        eager = partial(torch.compiler.set_stance, "force_eager")
        around = (eager, reference.without_wrappers, *in_float64, *around)
        with suppress(Exception):
            return self._run(self._first, *around, calls=calls, **options)
        return None

    def memory(self) -> Iterator[Progress]:
        """Measure the allocator's peak in one step of each variant, from its warm state."""
        for runner in self._runners:
            if runner.record.memory is not None:
                continue
            yield Progress(0.0, f"memory of {runner.record.name}")
            assert runner.warm is not None
            with runner.applied():
                runner.warm.restore()
                state = memory.state_tensors(runner.step.models, runner.step.optimizers)
                try:
                    runner.record.memory = memory.needed(runner.once, runner.device, state)
                except Exception as error:
                    runner.fail(error)


class Scorer:
    """Ask the user's function for its number, under one variant after another.

    Raises StepError where the model as it is has no usable number.
    """

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
                f"{name} calls no model that the step uses, so no plan changes its number"
            )
        if changed := _changed(step, {id(tensor) for tensor in held.overwritten()}):
            raise StepError(f"{name} changes the model: {changed}")
        return score

    def _score(self, runner: Runner) -> float:
        """Return a number; raise StepError in one line for any error of the function."""
        for records_gradients in (False, True):  # only if the function needs them
            runner.step.rewind()
            try:
                with torch.set_grad_enabled(records_gradients):
                    return self.accuracy.score(interrupts.in_a_window(self._call))
            except SpeedKitError:
                raise
            except Exception as error:
                line = in_a_line(error)
            if "require grad" not in line:  # a backward pass met a result that recorded nothing
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
