"""A budget is a promise about the clock: everything counts but compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from speedkit_jupyter.rounds import clock, compilations

# Seconds of a comparison or a profile without a budget of the user's.
DEFAULT_S = 10.0
# Nothing is begun that would end later than this many times the budget.
LATEST = 1.1
# Imports, copies and checks of the shortest step take about a second. Under a smaller budget, a
# minimal one, steps shorter than SHORT_S are warmed up and checked all the same.
OVERHEAD_S, SHORT_S = 1.0, 0.05
# Steps of each variant in its warm-up, about.
APART = 2
# Cost of checks in steps of the baseline (counted on an MLP of 12 million weights): a call in
# float64 and two that are watched; a call rounded to another precision; two calls of a variant.
REFERENCE, ROUNDED, CHECKED = 7, 3, 3
CHECK_STEPS = REFERENCE + ROUNDED + CHECKED
# A check of one variant takes this long, however short its steps are.
CHECK_S = 0.1
# No number of seconds is promised to be enough: noise decides how many there have to be.
LONGER = "a longer --budget may settle it"


class Budget:
    """Seconds for all of a measurement. `excluded_s` don't count: compiling, turns given up.

    `reserved_s` are kept for the end. A budget `within` another ends with it at the latest.
    `begun_s` is when it began on the clock; now, without.
    """

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] | None = None,
        within: Budget | None = None,
        begun_s: float | None = None,
        reserved_s: float = 0.0,
    ) -> None:
        self.seconds, self.excluded_s, self.reserved_s = seconds, 0.0, reserved_s
        self.now, self._within = now or clock.now, within
        self.is_part = within is not None
        self._start = self.now() if begun_s is None else begun_s

    @property
    def spent_s(self) -> float:
        """Return the seconds that count, until now."""
        return self.now() - self._start - self.excluded_s

    @property
    def left_s(self) -> float:
        """Return what remains; negative once it is overdrawn."""
        return self.seconds - self.spent_s - self.reserved_s

    @property
    def room_s(self) -> float:
        """Return the most seconds that may still be begun: what `allows` allows."""
        latest_s = max(LATEST * self.seconds, OVERHEAD_S if self.is_minimal else 0.0)
        room_s = latest_s - self.spent_s - self.reserved_s
        if self.is_minimal:
            room_s = max(room_s, SHORT_S)
        return (
            room_s if self._within is None else min(room_s, self._within.room_s - self.reserved_s)
        )

    @property
    def share(self) -> float:
        """Return how much of it is spent, 0 to 1."""
        return min(max(self.spent_s / self.seconds, 0.0), 1.0)

    @property
    def is_minimal(self) -> bool:
        """Return whether it is shorter than the overhead of any measurement."""
        return self.seconds < OVERHEAD_S if self._within is None else self._within.is_minimal

    def allows(self, seconds: float) -> bool:
        """Return whether work of these seconds may still be begun."""
        return seconds <= self.room_s

    def exclude(self, seconds: float) -> None:
        """Leave these seconds out, here and in the budget around it."""
        self.excluded_s += max(seconds, 0.0)
        if self._within is not None:
            self._within.exclude(seconds)

    def grow(self, seconds: float) -> None:
        """Have at least these seconds, where the budget is not the user's."""
        self.seconds = max(self.seconds, seconds)

    @contextmanager
    def reserving(self, seconds: float) -> Iterator[None]:
        """Reserve seconds more within the block."""
        self.reserved_s += seconds
        try:
            yield
        finally:
            self.reserved_s -= seconds


@contextmanager
def compiling_excluded(budget: Budget, usual_s: float) -> Iterator[None]:
    """Leave out the seconds of the block beyond the `usual_s`, if it compiles."""
    begun_s, graphs = clock.now(), compilations.graphs()
    try:
        yield
    finally:
        if compilations.graphs() > graphs:
            budget.exclude(clock.now() - begun_s - usual_s)


def clear_answer_s(step_s: float, variants: int) -> float:
    """Return about how many seconds a clear answer about this many variants takes."""
    return step_s * (CHECK_STEPS + variants * (APART + 12))  # rounds, about


def few_digits(seconds: float) -> str:
    """Return a budget in few digits: `3.69`, `15`, `1500`."""
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
