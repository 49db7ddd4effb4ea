"""Runs single steps from the user's own state, watched, and gathers what variants are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

from speedkit_jupyter.measure.checks import reference, roofline, rounding
from speedkit_jupyter.measure.checks.deviations import sums
from speedkit_jupyter.measure.checks.judge import Judge
from speedkit_jupyter.measure.checks.observer import Run
from speedkit_jupyter.measure.checks.values import is_plain, plain
from speedkit_jupyter.measure.rounds import confinement
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.optimizations.properties import calls

Surrounding = Callable[[], AbstractContextManager[object]]
# Calls of the step: the second one meets what the first has left, in a cache or an optimizer.
CALLS = 2


class Trials:
    """Runs of the `first` variant, and of others beside what it has shown (`judge`).

    Where results are named in `check`, only these are compared. `dropout_off` is known after a run.
    """

    def __init__(self, first: Runner, start: Snapshot, check: Sequence[str]) -> None:
        self._first, self._start, self._check = first, start, check
        self.judge = Judge()
        self.dropout_off = False

    def run(self, runner: Runner, *around: Surrounding, **options: Any) -> Run:
        """Return what some calls of the step show beside the trace; see `Observer`.

        It begins in the user's own state and leaves that.
        """
        __tracebackhide__ = True
        judge, drawn = self.judge, set[str]()
        replays = judge.drawn != set() and not is_compiled(runner)
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                without_dropout = reference.without_dropout(runner.step.models)
                self.dropout_off = stack.enter_context(without_dropout)
                for surrounding in around:
                    stack.enter_context(surrounding())
                stack.enter_context(reference.replayed(drawn) if replays else nullcontext())
                found = runner.observed(judge.trace, self._check, CALLS, **options)
        finally:
            self._start.restore()
        if replays:
            judge.drawn = drawn | (judge.drawn or set())
        return found

    def prepare(self) -> None:
        """Know what the reference and the baseline give, before any variant is judged.

        The stages of a search begin in the same state: an earlier one's judge is used again.
        """
        __tracebackhide__ = True
        self._start.restore()
        first, kept = self._first, self._first.step.kept
        tensors = [
            tensor
            for model in first.step.models
            for tensor in (*model.parameters(), *model.buffers())
        ]
        begins = [part.off for part in sums([(plain(t.detach().float()), None) for t in tensors])]
        if "judge" not in kept or kept["judge"][1] != begins:
            self._gather()
            kept["judge"] = self.judge, begins
        self.judge = judge = kept["judge"][0]
        first.record.accuracy = judge.verdict(judge.baseline, first.precision)

    def _gather(self) -> None:
        """Run the step in float64, and the baseline."""
        __tracebackhide__ = True
        first, judge, models = self._first, self.judge, self._first.step.models
        held = reference.parameters_of([*models, *first.step.optimizers])
        with confinement.calls_noted(models) as reached:
            # An error inside its forward pass breaks a sharded model.
            if all(map(is_plain, held)) and self._plainly(True, extends=True) is None:
                judge.trace.clear()
        if reached.in_pythons:  # float64 would reach the model there, and not its input
            judge.trace.clear()
        covered = set(judge.trace)
        with rounding.noted_autocast() as entered, confinement.calls_noted(models) as reached:
            judge.baseline = self.run(first, extends=True)
        judge.lowered = rounding.lowest(*entered, *rounding.of_dtypes(p.dtype for p in held))
        if reached.only_elsewhere:
            judge.void = confinement.NOT_REACHED
            return
        for (key, name), row in judge.baseline.rows.items():
            if key in covered:
                judge.own.add(key, name, row)
        if not judge.follows():
            judge.trace, judge.own = {}, Run()
            judge.baseline = self.run(first, extends=True)
        if not judge.own.rows:  # nothing else has shown that the step computes the same each time
            self.run_again()
        if not all(row.is_finite for row in judge.baseline.rows.values()):
            judge.void = "the step itself gives numbers that are not finite"

    def run_again(self) -> None:
        """Run the baseline once more, for what it gives otherwise by itself."""
        self.judge.note_unlike(self.run(self._first))

    def add_control(self, precision: str, loss_scale: float) -> None:
        """Run one more control of this precision: one rounds at random, one to nearest."""
        runs = self.judge.controls.setdefault(precision, [])
        if len(runs) < 2:
            options = precision, bool(runs), loss_scale
            wide = bool(self.judge.own.rows) and self.judge.lowered != "fp32"
            run = self._plainly(wide, lambda: rounding.rounded(*options))
            runs += [] if run is None else [run]

    def _plainly(self, wide: bool, *around: Surrounding, **options: Any) -> Run | None:
        """Run the first variant where neither compiled code nor wrappers are in the way of float64,
        which is `wide`. None where the code doesn't allow that, or a dispatch mode.
        """
        step = self._first.step
        every: list[Any] = [*step.models, *step.optimizers, *step.bystanders]
        models = [one for one in every if hasattr(one, "buffers")]
        optimizers = [one for one in every if hasattr(one, "param_groups")]
        before: list[Surrounding] = [roofline.eager, reference.without_wrappers]
        if wide:
            before.append(lambda: reference.in_float64(models, optimizers))
        with suppress(Exception):
            return self.run(self._first, *before, *around, ends_early=True, **options)
        return None


def is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles: such code draws its own numbers."""
    if runner.record.is_compiled:
        return True
    return any(
        calls.is_compiled(part) or hasattr(part, "_orig_mod")
        for model in runner.step.models
        for part in model.modules()
    )
