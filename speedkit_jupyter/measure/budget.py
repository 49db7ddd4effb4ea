"""A budget is a promise about the clock: everything counts, but compiling, which is told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from speedkit_jupyter.measure import clock, compilations

T = TypeVar("T")

# Nothing is begun that would end later than this many times the budget.
LATEST = 1.1
# What a measurement of the shortest step takes anyway: imports, copies, checks. A step shorter
# than SHORT_S is warmed up and checked within that, whatever the budget is.
OVERHEAD_S, SHORT_S = 1.0, 0.05
# For a clear answer each variant runs about so often: warm-up and check, rounds. Besides them the
# baseline is checked twice and in float64, and rounded to each other precision among the variants,
# operation by operation: about so many of the step's times.
APART, ROUNDS, REFERENCE, ROUNDED = 4, 12, 8, 8
# Budgets are advised up to this many seconds; what takes longer is said in words.
MOST_ADVISED_S = 900.0


class Budget:
    """Seconds for all of a measurement. `excluded_s` don't count: compiling, turns given up."""

    def __init__(self, seconds: float, now: Callable[[], float] | None = None) -> None:
        self.seconds, self.excluded_s = seconds, 0.0
        self._now = now or clock.now
        self._start = self._now()

    @property
    def spent_s(self) -> float:
        """What counts, until now."""
        return self._now() - self._start - self.excluded_s

    @property
    def left_s(self) -> float:
        """What remains; negative once it is overdrawn."""
        return self.seconds - self.spent_s

    @property
    def share(self) -> float:
        """How much of it is spent, 0 to 1."""
        return min(max(self.spent_s / self.seconds, 0.0), 1.0)

    def allows(self, seconds: float) -> bool:
        """Whether steps that take so long may still be begun; short ones always may."""
        return seconds <= SHORT_S or self.spent_s + seconds <= max(
            LATEST * self.seconds, OVERHEAD_S
        )

    def without_compiling(self, parts: Iterable[T], usual_s: float) -> Iterator[T]:
        """The same parts; where one of them compiled, what it took beyond `usual_s` is excluded."""
        every = iter(parts)
        while True:
            start, graphs = self._now(), compilations.graphs()
            try:
                part = next(every)
            except StopIteration:
                return
            if compilations.graphs() > graphs:
                self.excluded_s += max(self._now() - start - usual_s, 0.0)
            yield part


def clear_answer_s(step_s: float, variants: int) -> float:
    """About how many seconds a clear answer about so many variants of a step takes."""
    return step_s * (REFERENCE + ROUNDED + variants * (APART + ROUNDS))


def few_digits(seconds: float) -> str:
    """`3.69`, `15`, `1500`: a budget in words, without unit."""
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


def advice(seconds: float, does: str, doing: str, given_s: float = 0.0) -> str:
    """`--budget 120 may settle it`, or `settling it would take hours`; never an absurd number.

    `given_s` is the budget that was not enough: twice as much is the least that is advised.
    """
    seconds = max(seconds, 2 * given_s)
    if seconds <= MOST_ADVISED_S:
        step = 5 if seconds <= 60 else 30
        return f"--budget {max(math.ceil(seconds / step), 1) * step} {does}"
    if seconds <= 3600:
        return f"{doing} would take about {math.ceil(seconds / 300) * 5} minutes"
    return f"{doing} would take hours"
