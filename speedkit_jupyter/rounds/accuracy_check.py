"""Check variants: compare the values of untimed steps with a trace, computed in float64.

Each run starts from the user's state; `right/observer.py` lists the kinds of runs. A baseline run
completes the trace, or records all of it if float64 fails. A second baseline run may show whether
the step is deterministic. Control runs show the effect of rounding.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.model_changes import calls
from speedkit_jupyter.right import observer, reference
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.right.trace import Key, Look, ObservedRun
from speedkit_jupyter.rounds import budget as costs
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Comparison, Progress
from speedkit_jupyter.rounds.pool import Pool
from speedkit_jupyter.rounds.runner import MOST_OVERFLOWS, Runner, Surrounding
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.step.watching import watching
from speedkit_jupyter.torchglue import confinement, heap
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD
from speedkit_jupyter.torchglue.storage import is_plain


def _is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles a model, which changes its random numbers."""
    parts = [part for model in runner.step.models for part in model.modules()]
    by_user = any(calls.is_compiled(part) or hasattr(part, COMPILED_CHILD) for part in parts)
    return runner.record.is_compiled or by_user


class AccuracyCheck:
    """Run a few calls of the step under each variant, and compare their values with the trace."""

    def __init__(self, first: Runner, pool: Pool) -> None:
        self._first = first
        self._start, self._judge = pool.guard.state, pool.judge
        self._dropout_off = False

    def run(
        self, runners: Sequence[Runner], policy: Policy, comparison: Comparison, budget: Budget
    ) -> Generator[Progress, None, bool]:
        """Check the variants that the policy selects, and record their accuracy.

        The first check ignores the budget in a proof, or if its variant is faster. If time is
        short, other faster variants get "not checked". Returns whether checks disabled dropout.
        """
        first, by_name, is_first = self._first, {one.record.name: one for one in runners[1:]}, True
        needed_s = (costs.REFERENCE + costs.CHECKED) * first.usual_s
        for record in policy.to_check(comparison):
            runner, is_faster = by_name.get(record.name), comparison.verdict(record) == "faster"
            if runner is None or record.failure:
                continue
            needed_s += costs.CHECKED * first.usual_s
            if (is_first and (policy.proves or is_faster)) or budget.allows(needed_s):
                if record.accuracy is None:  # not checked by an earlier benchmark
                    yield Progress(1.0, f"checking {record.name}")
                    with budget.compiling_excluded(needed_s), heap.kept():
                        record.accuracy = self.check(runner)
                        first.record.accuracy = self.baseline_accuracy
                is_first, needed_s = False, 0.0
            elif is_faster:
                record.accuracy = Accuracy("not checked", "the budget was too short to check")
        return self._dropout_off

    @property
    def baseline_accuracy(self) -> Accuracy:
        """Return the baseline's accuracy, known after a check."""
        return self._judge.accuracy(self._judge.baseline, self._first.precision)

    def check(self, runner: Runner) -> Accuracy | None:
        """Return the accuracy of a variant; None if its step fails (the record has the error)."""
        judge, first = self._judge, self._first
        if not judge.baseline.ends:
            self._start.restore()
            self._record_trace()
        if runner.proof is not None:
            return runner.proof(self._start.restore)
        precision = judge.judged_in(runner.precision)
        if not judge.void and precision != "fp32" and precision not in judge.controls:
            self._add_control(precision, runner)
        try:
            for _ in range(MOST_OVERFLOWS):
                before = runner.scale()
                run = self._run(observer.COMPARED_RUN, runner)
                if not runner.scale() < before:  # its GradScaler did not skip the step
                    break
        except Exception as error:
            runner.fail(error)
            return None
        if runner.record.is_other_model(first.record):
            return judge.accuracy_of_other_model(run, runner.precision)
        # Before the verdict "wrong", run more controls, and the baseline once more.
        for number in range(6):
            if number >= judge.runs_before_verdict(run, runner.precision):
                break
            if number == 1:
                judge.note_unlike(self._run(observer.COMPARED_RUN, first))
            else:
                calls, most = len(judge.baseline.ends), 6 if number else 2
                self._add_control(precision, runner, calls, most)
        return self._unless_random(runner, judge.accuracy(run, runner.precision))

    def _record_trace(self) -> None:
        """Record a trace, in float64 if possible, and a baseline run; give the judge both."""
        first, judge, models = self._first, self._judge, self._first.step.models
        held = reference.parameters_of([*models, *first.step.optimizers])
        trace, covered = dict[Key, Look](), set[Key]()
        with suppress(Exception), confinement.calling_threads(models) as threads:
            if all(map(is_plain, held)):  # a sharded model would break after an error
                kind = observer.REFERENCE_RUN
                self._run(kind, first, *self._plain(kind), calls=1, trace=trace)
                covered = set(trace)
        # If another Python thread calls the model, its inputs would not be float64.
        if not covered or confinement.IN_PYTHONS in threads:
            trace, covered = {}, set()
        with reference.noted_autocast() as entered, confinement.calling_threads(models) as threads:
            baseline = self._run(observer.BASELINE_RUN, first, trace=trace)
        lowered = reference.lowest(*entered, *reference.of_dtypes(p.dtype for p in held))
        judge.begin(trace, baseline, covered, lowered)
        if threads and confinement.HERE not in threads:
            judge.void = confinement.NOT_REACHED
            return
        if not judge.follows():
            trace = {}
            judge.begin(trace, self._run(observer.BASELINE_RUN, first, trace=trace), set(), lowered)
        if not judge.own.rows:  # the float64 run has not shown that the step is deterministic
            judge.note_unlike(self._run(observer.COMPARED_RUN, first))
        if not all(row.is_finite for row in judge.baseline.rows.values()):
            judge.void = "the step itself computes non-finite numbers"

    def _add_control(self, precision: str, runner: Runner, calls: int = 1, most: int = 2) -> None:
        """Add a control run of `calls` rounded calls, unless `most` runs exist or the run fails."""
        runs = self._judge.controls.setdefault(precision, [])
        if len(runs) < most:
            wide = bool(self._judge.own.rows) and self._judge.lowered != "fp32"
            around: Surrounding = partial(reference.rounded, precision, len(runs), runner.scale())
            # The first kind copies the trace's parameters instead of stepping optimizers: a step in
            # float64 takes as long as the rest of the run. After an error, optimizers are stepped.
            for kind in (observer.LED_CONTROL_RUN, observer.CONTROL_RUN):
                with suppress(Exception):
                    given = [*self._plain(kind, wide), around]
                    runs.append(self._run(kind, self._first, *given, calls=calls))
                    return

    def _plain(self, kind: observer.RunKind, wide: bool = True) -> list[Surrounding]:
        """Return Surroundings that disable compiling and DDP and, if `wide`, use float64."""
        step = self._first.step
        held: list[Any] = [*step.models, *step.optimizers, *step.bystanders]
        steps = not (kind.stops_at_step or kind.led)
        in_float64 = partial(reference.in_float64, held, steps)
        eager = partial(torch.compiler.set_stance, "force_eager")
        return [eager, reference.without_wrappers, *([in_float64] if wide else [])]

    def _run(
        self,
        kind: observer.RunKind,
        runner: Runner,
        *around: Surrounding,
        calls: int = 0,
        trace: dict[Key, Look] | None = None,
    ) -> ObservedRun:
        """Run calls of the step, restore the user's state, return differences from the trace."""
        judge, drawn, step = self._judge, set[str](), runner.step
        replays = judge.drawn != set() and not _is_compiled(runner)
        # A second call starts from the state that the first call left, such as a cache.
        calls = calls or len(judge.baseline.ends) or (2 if self._first.facts.leaves else 1)
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                self._dropout_off = stack.enter_context(reference.without_dropout(step.models))
                for surrounding in around:
                    stack.enter_context(surrounding())
                stack.enter_context(reference.replayed(drawn) if replays else nullcontext())
                trace, asked = judge.trace if trace is None else trace, runner.facts.asked or ()
                seen = observer.Observer(step, kind, trace, runner.scale, "grad_scaler" in asked)
                is_lowered = runner.contexts[0].plan["precision"].active
                if is_lowered and "autocast" not in asked:  # other threads would not use autocast
                    stack.enter_context(confinement.refused_elsewhere(step.models))
                stack.enter_context(watching(step.models, seen))
                stack.enter_context(suppress(observer.Enough))
                while len(seen.run.ends) < calls and not seen.is_done:
                    seen.step_ended({"": runner.once()} | step.results())
                    if runner.facts.repeats.alone:
                        break
        finally:
            self._start.restore()
        if replays:
            judge.drawn = drawn | (judge.drawn or set())
        return seen.run

    def _unless_random(self, runner: Runner, accuracy: Accuracy) -> Accuracy:
        """Return the accuracy; "wrong" becomes "not checked" if random numbers may explain it."""
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
