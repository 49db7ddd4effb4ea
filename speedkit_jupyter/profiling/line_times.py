"""Which lines of the user's own code the time goes to, by looking at their thread again and again.

Nothing is traced: each look takes some microseconds, and what lies between two looks counts for
what the second one sees.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.split import Look, Part, Split

# Seconds between two looks, and after which Python lets another thread go on.
EVERY_S, SWITCH_S = 0.001, 0.0005
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
        """In the block this thread is looked at; the split runs in it, and says which part it is.

        What telling the split takes is no part of the step, here neither.
        """
        here, base, ends = threading.get_ident(), sys._getframe(2), threading.Event()
        switched_s = sys.getswitchinterval()

        def look() -> None:
            before_s = time.perf_counter()
            while not ends.is_set():
                time.sleep(EVERY_S)
                now_s = time.perf_counter()
                frame = sys._current_frames().get(here)
                if split.depth and frame is not None and not ends.is_set():
                    self._look(split, _spots(frame, base), now_s - before_s)
                del frame
                before_s = now_s

        thread = threading.Thread(target=look, name="speedkit lines", daemon=True)
        sys.setswitchinterval(min(SWITCH_S, switched_s))
        begun_s = time.perf_counter()
        thread.start()
        try:
            yield
        finally:
            self.total_s += time.perf_counter() - begun_s
            ends.set()
            thread.join()
            sys.setswitchinterval(switched_s)

    def _look(self, split: Split, spots: list[Spot], took_s: float) -> None:
        if split.part == "ours":
            return
        undecided = split.undecided
        look = Look(spots, split.part, took_s, in_torch=undecided is not None)
        self._looks.append(look)
        if undecided is not None:
            undecided.append(look)


def _spots(frame: FrameType | None, base: FrameType) -> list[Spot]:
    """The user's lines that are at work, innermost first."""
    found = []
    while frame is not None and frame is not base:
        if user_lines.is_users(frame.f_code.co_filename):
            found.append(Spot(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found
