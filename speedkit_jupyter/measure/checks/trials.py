"""Runs single steps of a variant from the user's own state, watched, and puts all back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from speedkit_jupyter.measure.checks import reference, roofline, rounding
from speedkit_jupyter.measure.checks.deviations import sums
from speedkit_jupyter.measure.checks.observer import Key, Look, Run
from speedkit_jupyter.measure.checks.values import plain
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.optimizations.properties import calls

Surrounding = Callable[[], AbstractContextManager[object]]
# Calls of the step: the second one meets what the first has left, in a cache or an optimizer.
CALLS = 2


class Trials:
    """`dropout_off` is known once a step ran; `drawn` names the operations that drew numbers."""

    def __init__(self, start: Snapshot, check: Sequence[str]) -> None:
        self._start, self._check = start, check
        self.dropout_off = False
        self.drawn: set[str] | None = None

    def run(
        self, runner: Runner, trace: dict[Key, Look], *around: Surrounding, **options: Any
    ) -> Run:
        """Return what some calls of the step show beside the trace; see `Observer`.

        It begins in the user's own state and leaves that.
        """
        __tracebackhide__ = True
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                off = stack.enter_context(reference.without_dropout(runner.step.models))
                self.dropout_off = off
                for surrounding in around:
                    stack.enter_context(surrounding())
                if self.drawn != set() and not is_compiled(runner):
                    stack.enter_context(self._replayed())
                return runner.observed(trace, self._check, CALLS, **options)
        finally:
            self.restore()

    def restore(self) -> None:
        """Put the user's own state back."""
        self._start.restore()

    def fingerprint(self, runner: Runner) -> list[float]:
        """Return what tells whether the models begin with the same values."""
        tensors = [
            t for model in runner.step.models for t in (*model.parameters(), *model.buffers())
        ]
        values = [plain(tensor.detach().float()) for tensor in tensors]
        return [part.off for part in sums([(value, None) for value in values])]

    def reference(self, runner: Runner, trace: dict[Key, Look]) -> None:
        """Leave a trace of the step in float64; an empty one where it can't be had."""
        with suppress(Exception):  # an operation without float64, or code that asks for float32
            around = (*_plainly(runner), self._in_float64(runner))
            self.run(runner, trace, *around, extends=True, ends_early=True)
            return
        trace.clear()

    def control(
        self, runner: Runner, trace: dict[Key, Look], precision: str, to_nearest: bool,
        loss_scale: float, in_float64: bool,
    ) -> Run | None:  # fmt: skip
        """Return how far the step is off with rounding to this precision."""
        around = [*_plainly(runner), *([self._in_float64(runner)] if in_float64 else [])]
        around.append(lambda: rounding.rounded(precision, to_nearest, loss_scale))
        with suppress(Exception):  # code that doesn't allow a dispatch mode
            return self.run(runner, trace, *around, ends_early=True)
        return None

    def _in_float64(self, runner: Runner) -> Surrounding:
        step = runner.step
        every: list[Any] = [*step.models, *step.optimizers, *step.bystanders]
        models = [one for one in every if hasattr(one, "buffers")]
        optimizers = [one for one in every if hasattr(one, "param_groups")]
        return lambda: reference.in_float64(models, optimizers)

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        drawn = set[str]()
        with reference.replayed(drawn):
            yield
        self.drawn = (self.drawn or set()) | drawn


def _plainly(runner: Runner) -> tuple[Surrounding, ...]:
    """Surroundings in which neither compiled code nor wrappers are in the way of float64."""
    return roofline.eager, reference.without_wrappers


def is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles: such code draws its own numbers."""
    if runner.record.is_compiled:
        return True
    return any(
        calls.is_compiled(part) or hasattr(part, "_orig_mod")
        for model in runner.step.models
        for part in model.modules()
    )
