"""Single, untimed steps of variants: their accuracy and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from speedkit_jupyter.catalog.properties import calls
from speedkit_jupyter.right import reference, rounding
from speedkit_jupyter.right.accuracy import Accuracy
from speedkit_jupyter.right.observer import Key, Look, ObservedRun
from speedkit_jupyter.rounds import roofline
from speedkit_jupyter.rounds.pool import Pool
from speedkit_jupyter.rounds.runner import MOST_OVERFLOWS, Runner
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.step import memory
from speedkit_jupyter.torchglue import confinement
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD
from speedkit_jupyter.torchglue.plain_values import is_plain

Surrounding = Callable[[], AbstractContextManager[object]]
# Control runs that decide about a few numbers: of a single one, as a loss, one control may be near
# by chance.
MOST_CONTROLS = 6


def is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles: such code draws its own numbers."""
    parts = [part for model in runner.step.models for part in model.modules()]
    by_user = any(calls.is_compiled(part) or hasattr(part, COMPILED_CHILD) for part in parts)
    return runner.record.is_compiled or by_user


class Examination:
    """Steps of working variants; one that raises is a row that says so, and the others go on.

    All are judged by the trace of the first; where results are named in `check`, by these.
    """

    def __init__(self, runners: Sequence[Runner], pool: Pool, check: Sequence[str] = ()) -> None:
        self._runners, self._first, self._named = runners, runners[0], check
        self._start, self._judge = pool.guard.state, pool.judge
        self.dropout_off = False  # while accuracy was checked

    def late(self, runner: Runner) -> Iterator[Progress]:
        """Check what a variant computes, after its rounds, unless an earlier benchmark did.

        It costs two calls; once for all variants one in float64 and two of the baseline, and a
        rounded one for each lower precision.
        """
        if not (runner.record.failure or runner.record.accuracy):
            yield Progress(1.0, f"checking {runner.record.name}")
            self._check(runner)

    def _check(self, runner: Runner) -> None:
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
        more = [partial(every, most=MOST_CONTROLS)] * (MOST_CONTROLS - 2)
        accuracy = judge.verdict(run, runner.precision, (every, self._run_again), more)
        record.accuracy = self._unless_random(runner, accuracy)

    def _unless_random(self, runner: Runner, accuracy: Accuracy) -> Accuracy:
        """Return "not checked" where a variant may differ by its random numbers alone."""
        drawn = self._judge.drawn
        if accuracy.verdict != "wrong" or not drawn:
            return accuracy
        inside = [] if runner.steps_only else sorted(filter(reference.draws_inside, drawn))
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
                # A second call meets the state that the first has left, in a cache or an optimizer.
                calls = calls or (2 if self._first.facts.leaves else 1)
                trace = judge.trace if trace is None else trace
                found = runner.observed(trace, self._named, calls, **options)
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
        with rounding.noted_autocast() as entered, confinement.calls_noted(models) as reached:
            baseline = self._run(first, trace=trace, extends=True)
        lowered = rounding.lowest(*entered, *rounding.of_dtypes(p.dtype for p in held))
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
        """Run the baseline once more, for what it gives otherwise by itself."""
        self._judge.note_unlike(self._run(self._first))

    def _add_control(self, precision: str, runner: Runner, calls: int = 1, most: int = 2) -> None:
        """Run one more control of this precision, if there are not as many as `most` yet.

        Those after the first, before an accusation, make all `calls` that are compared.
        """
        runs = self._judge.controls.setdefault(precision, [])
        if len(runs) < most:
            options = precision, len(runs), runner.scale()
            wide = bool(self._judge.own.rows) and self._judge.lowered != "fp32"
            around = partial(rounding.rounded, *options)
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
        around = (roofline.eager, reference.without_wrappers, *in_float64, *around)
        with suppress(Exception):
            return self._run(self._first, *around, calls=calls, **options)
        return None

    def memory(self) -> Iterator[Progress]:
        """Measure the allocator's peak in one step of each variant."""
        for runner in self._runners:
            if runner.record.memory is not None:
                continue
            yield Progress(0.0, f"memory of {runner.record.name}")
            with self._warm(runner):
                state = memory.state_tensors(runner.step.models, runner.step.optimizers)
                runner.record.memory = memory.needed(runner.once, runner.device, state)

    @contextmanager
    def _warm(self, runner: Runner) -> Iterator[None]:
        """Put the variant in force, in its warm state; an error in the block is the variant's."""
        assert runner.warm is not None
        with runner.applied():
            runner.warm.restore()
            try:
                yield
            except Exception as error:
                runner.fail(error)
