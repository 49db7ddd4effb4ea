"""Find which lines of the user's own code the time goes to, by a timer that interrupts them.

A signal's handler runs in the thread that it interrupts, between two steps of Python's interpreter,
so that it reads the frames of its own thread only. (Frames of another thread end while they are
read, and Python crashes.) What lies between two looks counts for what the second one sees.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.split import Look, Part, Split

# Seconds between two looks. One takes some 10 µs.
EVERY_S = 0.001
# A look counts for so much of what it would by itself, at the least and at the most.
LEAST, MOST = 0.4, 4.0


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


@dataclass
class LineTimes:
    """Shares of a step, 0 to 1: `own` are those of the innermost line of the user's, by part of the
    step; `inside` what goes on while a line has not ended, calls of other lines included; `python`
    what of the rest is Python itself (and other libraries), and no function of torch's.
    """

    own: Mapping[tuple[Spot, Part], float] = field(default_factory=dict)
    inside: Mapping[Spot, float] = field(default_factory=dict)
    python: Mapping[Spot, float] = field(default_factory=dict)
    looks: int = 0

    def costliest(self, part: Part | None = None) -> list[tuple[Spot, float]]:
        """Lines by their own time (of a part of the step only), the costliest first."""
        found = defaultdict[Spot, float](float)
        for (spot, where), share in self.own.items():
            if part in (None, where):
                found[spot] += share
        return sorted(found.items(), key=lambda item: -item[1])

    def part(self, spot: Spot) -> Part:
        """The one in which a line takes most of its time."""
        shares = {where: share for (at, where), share in self.own.items() if at == spot}
        return max(shares, key=lambda where: shares[where])

    def of(self, file: str, first: int, last: int) -> float:
        """The share of a statement, with all that it calls."""
        numbers = range(first, last + 1)
        return max((self.inside.get(Spot(file, number), 0.0) for number in numbers), default=0.0)


class Looks:
    """Collects what is seen in all calls that are made `while_looking`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._looks: list[Look] = []

    def result(self, shares: Mapping[Part, float]) -> LineTimes:
        """Of all calls so far. `shares` are those of the parts, as the split knows them: torch lets
        another thread look where it works outside of Python, as in a backward pass, more often than
        where Python does.
        """
        own = defaultdict[tuple[Spot, Part], float](float)
        inside, python = defaultdict[Spot, float](float), defaultdict[Spot, float](float)
        counts = self._counts(shares)
        for look in self._looks if counts else ():
            share = counts[look.part] * look.seconds
            if look.spots:
                own[look.spots[0], look.part] += share
                if look.part in ("rest", "data") and not look.in_torch:
                    python[look.spots[0]] += share
            for spot in set(look.spots):
                inside[spot] += share
        return LineTimes(own, inside, python, len(self._looks))

    def _counts(self, shares: Mapping[Part, float]) -> dict[Part, float]:
        """What a second of looks is of the step, by part."""
        seen = defaultdict[Part, float](float)
        for look in self._looks:
            seen[look.part] += look.seconds
        whole_s = sum(seen.values())
        return {
            part: min(max(shares.get(part, 0.0) / seconds, LEAST / whole_s), MOST / whole_s)
            for part, seconds in seen.items()
            if seconds
        }

    @contextmanager
    def while_looking(self, split: Split) -> Iterator[None]:
        """Look at this thread in the block; the split runs in it, and says which part it is.

        Nothing is seen where no timer can interrupt it (`can_interrupt`).
        """
        base, before_s = sys._getframe(2), time.perf_counter()

        def look() -> None:
            nonlocal before_s
            now_s = time.perf_counter()
            if split.depth:
                self._look(split, _spots(sys._getframe(1), base), now_s - before_s)
            before_s = now_s

        begun_s = before_s
        try:
            with _interrupted(look) if can_interrupt() else nullcontext():
                yield
        finally:
            self.total_s += time.perf_counter() - begun_s

    def _look(self, split: Split, spots: list[Spot], took_s: float) -> None:
        if split.part == "ours":
            return
        undecided = split.undecided
        look = Look(spots, split.part, took_s, in_torch=undecided is not None)
        self._looks.append(look)
        if undecided is not None:
            undecided.append(look)


def can_interrupt() -> bool:
    """Return whether a timer can interrupt this thread.

    Signals reach the main thread only, Windows has no such timer, and one that the user has set
    stays as it is.
    """
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
        and not signal.getitimer(signal.ITIMER_REAL)[0]
    )


@contextmanager
def _interrupted(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` every EVERY_S in the block, which may take the timer for itself."""
    import torch

    def handler(*_: object) -> None:
        look()

    # torch.compile would trace what interrupts compiled code.
    ours = torch.compiler.disable(handler)
    before = signal.signal(signal.SIGALRM, ours)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is ours:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _spots(frame: FrameType | None, base: FrameType) -> list[Spot]:
    """The user's lines that are at work, innermost first."""
    found = []
    while frame is not None and frame is not base:
        if user_lines.is_users(frame.f_code.co_filename):
            found.append(Spot(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found
