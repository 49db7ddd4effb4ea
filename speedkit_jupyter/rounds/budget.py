"""The time budget of a measurement, the cost of checks, and the counts of compilations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue import dynamo

# The default budget of a comparison, a search, a profile and advice, in seconds.
DEFAULT_BUDGET_S = 10.0
# `Budget.allows` refuses work that would end after this multiple of a budget of 1 s or more.
LATEST = 1.1
# Even for the shortest step, imports, copies and checks take about a second. A smaller budget is
# called minimal: short steps are still warmed up and checked.
OVERHEAD_S = 1.0
# Costs of checks in baseline steps, measured on an MLP with 12 million weights. REFERENCE is for a
# call in float64 and two observed calls, CHECKED for two calls of a variant or one rounded call.
REFERENCE, CHECKED = 7, 3
CHECK_STEPS = REFERENCE + 2 * CHECKED
# Seconds that the check of a variant takes in addition to the steps.
CHECK_S = 0.1
# The seconds that a verdict needs depend on noise, so the text names no number.
LONGER_BUDGET = "a longer --budget may settle it"


class Budget:
    """A time budget in seconds that starts at the clock time `begun_s` (default: now).

    `reserved_s` seconds are kept for work at the end. `allows` respects the outer budget `within`.
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
        self.now, self.within = now or clock.now, within
        self._start = self.now() if begun_s is None else begun_s

    @property
    def spent_s(self) -> float:
        return self.now() - self._start - self.excluded_s

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s - self.reserved_s

    @property
    def room_s(self) -> float:
        """Return the longest duration that `allows` accepts, in seconds."""
        latest_s = max(LATEST * self.seconds, OVERHEAD_S if self.is_minimal else 0.0)
        room_s = latest_s - self.spent_s - self.reserved_s
        if self.is_minimal:
            room_s = max(room_s, 0.05)  # a minimal budget always allows 50 ms
        return room_s if self.within is None else min(room_s, self.within.room_s - self.reserved_s)

    @property
    def share(self) -> float:
        return min(max(self.spent_s / self.seconds, 0.0), 1.0)

    @property
    def is_minimal(self) -> bool:
        """Return whether the outermost budget is below OVERHEAD_S."""
        return self.seconds < OVERHEAD_S if self.within is None else self.within.is_minimal

    def allows(self, seconds: float) -> bool:
        return seconds <= self.room_s

    def exclude(self, seconds: float) -> None:
        """Don't count these seconds in this budget and its outer budgets."""
        self.excluded_s += max(seconds, 0.0)
        if self.within is not None:
            self.within.exclude(seconds)

    def grow(self, seconds: float) -> None:
        self.seconds = max(self.seconds, seconds)

    @contextmanager
    def compiling_excluded(self, usual_s: float) -> Iterator[None]:
        """If the block compiles, exclude its time beyond `usual_s` seconds."""
        begun_s, before = clock.now(), graphs()
        try:
            yield
        finally:
            if graphs() > before:
                self.exclude(clock.now() - begun_s - usual_s)


@dataclass
class Compilations:
    """The number of compiled graphs, and whether a function reached torch's recompile limit."""

    graphs: int = 0
    limit_reached: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the compilations of the block from torch's counters, without resetting them."""
        before = _totals()
        try:
            yield
        finally:
            compiled, limits = _totals()
            self.graphs += compiled - before[0]
            self.limit_reached |= limits > before[1]


def graphs() -> int:
    """Return the number of graphs that Dynamo has compiled in this process."""
    return _totals()[0]


def _totals() -> tuple[int, int]:
    if f"{dynamo.COMPILERS[0]}.utils" not in sys.modules:
        return 0, 0
    counters = dynamo.compile_counters()
    unsupported = counters["unimplemented"].items()  # the count of each reason
    limits = [count for why, count in unsupported if re.match(r".*recompile.limit", why, re.I)]
    return counters["stats"]["unique_graphs"], sum(limits)
