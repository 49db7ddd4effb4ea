"""Runs single steps of a variant from the user's own state, watched, and puts all back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from speedkit_jupyter.measure.checks import roofline
from speedkit_jupyter.measure.checks.deviations import sums
from speedkit_jupyter.measure.checks.observing.observer import Look, Run
from speedkit_jupyter.measure.checks.reference import draws, promotion, rounding
from speedkit_jupyter.measure.checks.values.plain_tensors import plain
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.undo.snapshot import Snapshot
from speedkit_jupyter.optimizations.properties import calls

Surrounding = Callable[[], AbstractContextManager[object]]
# Calls of the step: the second one meets what the first has left, in a cache or an optimizer.
CALLS = 2
# Two controls of one precision round at different places: the second one is run before a variant is
# accused. In float32 it has four digits less, so that it rounds where every kernel does, and more.
SCALES, COARSE_DIGITS = (1.0, 1.37), 20


class Trials:
    """`dropout_off` and `is_random` are known once a step ran, compiled code apart; `drawn_inside`
    names kernels whose draws can't be made to agree.
    """

    def __init__(self, start: Snapshot, check: Sequence[str]) -> None:
        self._start, self._check = start, check
        self.dropout_off = False
        self.is_random: bool | None = None
        self.drawn_inside: set[str] = set()

    def run(
        self,
        runner: Runner,
        trace: dict[str, Look],
        *surroundings: Surrounding,
        calls: int = CALLS,
        **options: Any,
    ) -> Run:
        """Return what some calls of the step show beside the trace; see `observing`."""
        __tracebackhide__ = True
        self._start.restore()  # before the plan is applied: settings are part of the state
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                off = stack.enter_context(draws.without_dropout(runner.step.models))
                self.dropout_off = off
                for surrounding in surroundings:
                    stack.enter_context(surrounding())
                if self.is_random is not False and not is_compiled(runner):
                    stack.enter_context(self._replayed())
                return runner.observed(trace, self._check, calls, **options)
        finally:
            self._start.restore()

    def fingerprint(self, runner: Runner) -> list[float]:
        """Return what tells whether the models begin with the same values."""
        self._start.restore()
        tensors = [
            t for model in runner.step.models for t in (*model.parameters(), *model.buffers())
        ]
        values = [plain(tensor.detach().float()) for tensor in tensors]
        return [part.off for part in sums([(value, None) for value in values])]

    def reference(self, runner: Runner, trace: dict[str, Look]) -> Run | None:
        """Leave a trace of the step in float64; None where it can't be had."""
        models = runner.step.models
        exact = (*_plainly(runner), lambda: promotion.in_float64(models))
        with suppress(Exception):  # an operation without float64, or code that asks for float32
            return self.run(runner, trace, *exact, extends=True, ends_early=True)
        trace.clear()
        return None

    def control(
        self, runner: Runner, trace: dict[str, Look], precision: str, number: int,
        loss_scale: float, in_float64: bool,
    ) -> Run | None:  # fmt: skip
        """Return how far the step is off that is rounded to this precision after each operation."""
        models = runner.step.models
        held = [*models, *runner.step.optimizers]
        way = partial(
            rounding.rounded,
            precision,
            scale=SCALES[number],
            digits=COARSE_DIGITS if precision == "fp32" else None,
            loss_scale=loss_scale,
            suspends=not rounding.of_parameters(promotion.parameters_of(held)),
        )
        exact: list[Surrounding] = [*_plainly(runner)]
        exact += [lambda: promotion.in_float64(models)] if in_float64 else []
        with suppress(Exception):  # code that doesn't allow a dispatch mode
            return self.run(runner, trace, *exact, way, ends_early=True)
        return None

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        before = draws.states()
        with draws.replayed() as beyond:
            yield
        self.is_random = bool(self.is_random) or not draws.alike(before, draws.states())
        self.drawn_inside |= set(beyond)


def _plainly(runner: Runner) -> tuple[Surrounding, ...]:
    """Surroundings in which neither compiled code nor wrappers are in the way of float64."""
    return runner.guarded, roofline.eager, promotion.without_wrappers


def is_compiled(runner: Runner) -> bool:
    """Return whether the plan or the user compiles: such code draws its own numbers."""
    if runner.record.is_compiled:
        return True
    return any(
        calls.is_compiled(part) or hasattr(part, "_orig_mod")
        for model in runner.step.models
        for part in model.modules()
    )
