"""Check the accuracy of variants in single, untimed steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.properties import calls
from speedkit_jupyter.right import reference
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.right.observer import Enough, Key, Look, ObservedRun, Observer
from speedkit_jupyter.rounds.runner import MOST_OVERFLOWS, Pool, Runner
from speedkit_jupyter.step.watching import watching
from speedkit_jupyter.torchglue import confinement
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD
from speedkit_jupyter.torchglue.storage import is_plain

Surrounding = Callable[[], AbstractContextManager[object]]


def _is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles; compiled code draws other random numbers."""
    parts = [part for model in runner.step.models for part in model.modules()]
    by_user = any(calls.is_compiled(part) or hasattr(part, COMPILED_CHILD) for part in parts)
    return runner.record.is_compiled or by_user


class Examination:
    """Compare single steps of variants with a trace of the first variant."""

    def __init__(self, first: Runner, pool: Pool) -> None:
        self._first = first
        self._start, self._judge = pool.guard.state, pool.judge
        self.dropout_off = False  # True if dropout was disabled for the check

    @property
    def baseline_accuracy(self) -> Accuracy:
        """Return the baseline's accuracy, known after a check."""
        return self._judge.verdict(self._judge.baseline, self._first.precision)

    def check(self, runner: Runner) -> Accuracy | None:
        """Return the accuracy of a variant; None if its step fails (the record has the error)."""
        judge, first = self._judge, self._first
        if not judge.baseline.ends:
            self._start.restore()
            self._gather()
        precision = judge.judged_in(runner.precision)
        if not judge.void and precision != "fp32" and precision not in judge.controls:
            self._add_control(precision, runner)
        try:
            for _ in range(MOST_OVERFLOWS):
                before = runner.scale()
                run = self._run(runner)
                if not runner.scale() < before:  # its GradScaler did not skip the step
                    break
        except Exception as error:
            runner.fail(error)
            return None
        if runner.record.is_other_model(first.record):
            return judge.distance(run, runner.precision)
        for number in range(6):
            if number >= judge.runs_before_verdict(run, runner.precision):
                break
            if number == 1:
                judge.note_unlike(self._run(first))
            else:
                calls, most = len(judge.baseline.ends), 6 if number else 2
                self._add_control(precision, runner, calls, most)
        return self._unless_random(runner, judge.verdict(run, runner.precision))

    def _unless_random(self, runner: Runner, accuracy: Accuracy) -> Accuracy:
        """Return "not checked" if random numbers alone may explain the difference."""
        drawn = self._judge.drawn
        if accuracy.verdict != "wrong" or not drawn:
            return accuracy
        plans = {d.name for one in runner.contexts for d in one.plan if d.active}
        steps_only = plans == {"fused_optimizer"}  # changes only the optimizer's step
        inside = [] if steps_only else sorted(filter(reference.draws_inside, drawn))
        if _is_compiled(runner):
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
        """Run some calls of the step from the user's state, and return differences to the trace."""
        judge, drawn, step = self._judge, set[str](), runner.step
        replays = judge.drawn != set() and not _is_compiled(runner)
        # A second call starts from the state that the first call left, such as a cache.
        calls = calls or len(judge.baseline.ends) or (2 if self._first.facts.leaves else 1)
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                without_dropout = reference.without_dropout(step.models)
                self.dropout_off = stack.enter_context(without_dropout)
                for surrounding in around:
                    stack.enter_context(surrounding())
                stack.enter_context(reference.replayed(drawn) if replays else nullcontext())
                trace, asked = judge.trace if trace is None else trace, runner.facts.asked or ()
                observer = Observer(step, trace, runner.scale, "grad_scaler" in asked, **options)
                is_lowered = runner.contexts[0].plan["precision"].active
                if is_lowered and "autocast" not in asked:  # which a thread may enter by itself
                    stack.enter_context(confinement.refused_elsewhere(step.models))
                stack.enter_context(watching(step.models, observer))
                stack.enter_context(suppress(Enough))
                while len(observer.run.ends) < calls and not observer.is_done:
                    result = runner.once()
                    observer.step_ended({"": result} | step.results())
                    if runner.facts.repeats.alone:
                        break
        finally:
            self._start.restore()
        if replays:
            judge.note_drawn(drawn)
        return observer.run

    def _gather(self) -> None:
        """Record the trace in float64 if possible, and run the baseline."""
        first, judge, models = self._first, self._judge, self._first.step.models
        held = reference.parameters_of([*models, *first.step.optimizers])
        trace: dict[Key, Look] = {}
        with confinement.calling_threads(models) as threads:
            # A sharded model would break after an error in its forward pass.
            can_run = all(map(is_plain, held))
            options: dict[str, Any] = {"extends": True, "stops_at_step": True, "trace": trace}
            found = self._plainly(True, calls=1, **options) if can_run else None
        # If another Python thread calls the model, its inputs would not be float64.
        if found is None or confinement.IN_PYTHONS in threads:
            trace.clear()
        covered = set(trace)
        with reference.noted_autocast() as entered, confinement.calling_threads(models) as threads:
            baseline = self._run(first, trace=trace, extends=True)
        lowered = reference.lowest(*entered, *reference.of_dtypes(p.dtype for p in held))
        judge.begin(trace, baseline, covered, lowered)
        if threads and confinement.HERE not in threads:
            judge.give_up(confinement.NOT_REACHED)
            return
        if not judge.follows():
            trace = {}
            judge.begin(trace, self._run(first, trace=trace, extends=True), set(), lowered)
        if not judge.own.rows:  # no other comparison has shown that the step is deterministic
            judge.note_unlike(self._run(first))
        if not all(row.is_finite for row in judge.baseline.rows.values()):
            judge.give_up("the step itself computes non-finite numbers")

    def _add_control(self, precision: str, runner: Runner, calls: int = 1, most: int = 2) -> None:
        """Run one more control run of this precision over `calls` calls, up to `most` runs."""
        runs = self._judge.controls.setdefault(precision, [])
        if len(runs) < most:
            wide = bool(self._judge.own.rows) and self._judge.lowered != "fp32"
            around = partial(reference.rounded, precision, len(runs), runner.scale())
            # First with the trace's parameters, because an optimizer step in float64 takes as long
            # as the rest. Not every optimizer skips parameters without gradients.
            led = self._plainly(wide, around, led=True, calls=calls)
            run = led or self._plainly(wide, around, calls=calls)
            runs += [] if run is None else [run]

    def _plainly(self, wide: bool, *around: Surrounding, **options: Any) -> ObservedRun | None:
        """Run the first variant uncompiled and unwrapped, in float64 if `wide`; None on failure."""
        step, is_cut = self._first.step, options.keys() & {"stops_at_step", "led"}
        held: list[Any] = [*step.models, *step.optimizers, *step.bystanders]
        in_float64 = (partial(reference.in_float64, held, not is_cut),) if wide else ()
        eager = partial(torch.compiler.set_stance, "force_eager")
        around = (eager, reference.without_wrappers, *in_float64, *around)
        with suppress(Exception):
            return self._run(self._first, *around, ends_early=True, **options)
        return None
