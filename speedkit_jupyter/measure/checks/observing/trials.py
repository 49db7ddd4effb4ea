"""Single steps of a variant, and a few successive ones, from the user's own state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from speedkit_jupyter.measure.checks.comparing.changed_objects import left_in
from speedkit_jupyter.measure.checks.comparing.errors import errors
from speedkit_jupyter.measure.checks.observing.course import Course
from speedkit_jupyter.measure.checks.reference import draws
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.optimizations.properties import calls

Surrounding = Callable[[], AbstractContextManager[object]]


class Steps:
    """Runs steps of variants from the user's own state, watched, and puts all back.

    The first course, or the `lead`, is what all later ones follow. `dropout_off` and `is_random`
    are known once the baseline ran; `drawn_inside` names kernels whose draws can't be made to
    agree.
    """

    def __init__(self, start: State, check: Sequence[str]) -> None:
        self._start, self._check = start, check
        self.dropout_off = self.is_random = False
        self.drawn_inside: set[str] = set()
        self.lead: Course | None = None

    def observed(
        self, runner: Runner, *surroundings: Surrounding, limit: int | None = None
    ) -> Course:
        """The course of a variant, of its first `limit` stretches."""
        __tracebackhide__ = True
        self._start.restore()  # before the plan is applied: settings are part of the state
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                models = runner.step.models
                self.dropout_off = stack.enter_context(draws.without_dropout(models))
                for surrounding in surroundings:
                    stack.enter_context(surrounding())
                if self.is_random and not is_compiled(runner):
                    stack.enter_context(self._replayed())
                return runner.observed(
                    lambda: left_in(self._start, runner.step), self._check, self.lead, limit
                )
        finally:
            self._start.restore()

    def twice(self, runner: Runner) -> tuple[Course, Course]:
        """The same two times; whether it draws from torch's generators is known then."""
        __tracebackhide__ = True
        self.is_random, self.lead = False, None
        counts: list[bool] = []
        first = self.observed(runner, lambda: _counting(counts))
        self.is_random = any(counts)
        if self.is_random:
            first = self.observed(runner)
        self.lead = first
        return first, self.observed(runner)

    def alike(self, runner: Runner, kept: Mapping[str, Any]) -> bool:
        """Whether the baseline gives what it gave when this was kept, bit for bit."""
        __tracebackhide__ = True
        self.is_random, self.drawn_inside = kept["random"]
        lead = self.lead = kept["yardstick"].baseline
        course = self.observed(runner)
        if course.ends != lead.ends or course.stretches.keys() != lead.stretches.keys():
            return False
        for number, stretch in course.stretches.items():
            if not stretch.role:
                deviations = errors(stretch, lead.stretches[number], frozenset())
                off = (deviations.output.distance, deviations.gradient.distance)
                if (
                    not deviations.fits
                    or any(off)
                    or any(differing.count for differing in deviations.differing)
                ):
                    return False
        return True

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        with draws.replayed() as beyond:
            yield
        self.drawn_inside |= set(beyond)


def is_compiled(runner: Runner) -> bool:
    """By the plan or by the user: such code draws its own numbers."""
    if runner.record.is_compiled:
        return True
    return any(
        calls.is_compiled(part) or hasattr(part, "_orig_mod")
        for model in runner.step.models
        for part in model.modules()
    )


@contextmanager
def _counting(counts: list[bool]) -> Iterator[None]:
    """Whether torch's generators were drawn from in the block."""
    before = draws.states()
    yield
    counts.append(not draws.alike(before, draws.states()))
