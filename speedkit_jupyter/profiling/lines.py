"""The user's own lines: which one something is called from, and which ones the time goes to.

A timer interrupts the measured thread. A signal's handler runs in the thread that it interrupts,
between two steps of Python's interpreter, so that it reads frames of its own thread only. (Frames
of another thread end while they are read, and Python crashes.) What lies between two samples
counts for what the second one sees. Python runs handlers after calls and at the end of loops: a
long operation that calls nothing counts for the next line that does.
"""

from __future__ import annotations

import inspect
import linecache
import signal
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from speedkit_jupyter.profiling.split import LineSample, Part, Split
from speedkit_jupyter.support.tracebacks import is_door

OURS = str(Path(__file__).parents[1])
# Seconds between two samples. One takes some 10 µs.
EVERY_S = 0.001
# A sample counts for this share of what it would by itself, at the least and at the most.
LEAST, MOST = 0.4, 4.0


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


def user_spot(depth: int = 1) -> Spot | None:
    """Return the innermost line of the user's own code: no library's, not Python's, not ours.

    None where there is none: what a thread of a library's calls, or what we do between the user's
    calls. Lines that called us are not looked at.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = None if is_door(frame.f_code) else frame.f_back
    if frame is None:
        return None
    # What the compiler adds (the end of a `with`) is of no line.
    return Spot(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)


@cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's own."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = tuple({path for name in names if (path := sysconfig.get_path(name))})
    # A dataclass's methods are code of a `<string>`.
    return not file.startswith((OURS, "<frozen ", "<string>", *libraries))


@cache
def is_torchs(file: str) -> bool:
    """Return whether a file is one of torch's."""
    import torch

    return file.startswith(str(Path(inspect.getfile(torch)).parent))


def source(file: str, number: int) -> str:
    """Return the line as it is written; empty where nothing is known of the file."""
    return linecache.getline(file, number).strip()


def cells() -> dict[str, str]:
    """Return what the notebook calls the files that its cells are to Python; nothing elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"cell {number}" for file, number in numbers.items()}


def models_of(step: Callable[..., object]) -> dict[int, str]:
    """Return the variables of models by the models' ids, where the function was defined."""
    import torch

    function = inspect.unwrap(step)
    if not inspect.isfunction(function):
        return {}
    names: dict[str, Any] = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {
        id(value): name
        for name, value in reversed(names.items())
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }


@dataclass
class LineTimes:
    """Shares of a step, 0 to 1: `own` are those of lines of the user's, without other lines that
    they call, by part of the step; `python` what of the rest is Python itself (and other
    libraries), and no function of torch's.
    """

    own: Mapping[tuple[Spot, Part], float] = field(default_factory=dict)
    python: Mapping[Spot, float] = field(default_factory=dict)

    def costliest(self, part: Part | None = None) -> list[tuple[Spot, float]]:
        """Return lines by their own time (of a part of the step only), the costliest first."""
        found = defaultdict[Spot, float](float)
        for (spot, where), share in self.own.items():
            if part in (None, where):
                found[spot] += share
        return sorted(found.items(), key=lambda item: -item[1])

    def part(self, spot: Spot) -> Part:
        """Return the part in which a line takes most of its time."""
        shares = {where: share for (at, where), share in self.own.items() if at == spot}
        return max(shares, key=lambda where: shares[where])


class LineSampler:
    """Collects what is seen in all calls that are made while it is `sampling`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.seen: list[LineSample] = []

    def result(self, shares: Mapping[Part, float]) -> LineTimes:
        """Return the lines of all calls so far. `shares` are those of the parts, as the split knows
        them: some parts are interrupted more often than others.
        """
        own = defaultdict[tuple[Spot, Part], float](float)
        python = defaultdict[Spot, float](float)
        counts = self._counts(shares)
        for sample in self.seen:
            share = counts[sample.part] * sample.seconds
            if sample.spot is not None:
                own[sample.spot, sample.part] += share
                if sample.part in ("rest", "data") and not sample.in_torch:
                    python[sample.spot] += share
        return LineTimes(own, python)

    def _counts(self, shares: Mapping[Part, float]) -> dict[Part, float]:
        """Return what a second of samples is of the step, by part."""
        seen = defaultdict[Part, float](float)
        for sample in self.seen:
            seen[sample.part] += sample.seconds
        whole_s = sum(seen.values()) or 1.0
        return {
            part: min(max(shares.get(part, 0.0) / (spent_s or whole_s), LEAST / whole_s),
                      MOST / whole_s)
            for part, spent_s in seen.items()
        }  # fmt: skip

    @contextmanager
    def sampling(self, split: Split) -> Iterator[None]:
        """Sample this thread's lines in the block; the split runs in it, and says which part it is.

        Nothing is seen where no timer can interrupt it.
        """
        begun_s = before_s = time.perf_counter()

        def sample() -> None:
            nonlocal before_s
            now_s = time.perf_counter()
            if split.depth and split.part != "overhead":
                in_torch = split.undecided is not None
                found = LineSample(user_spot(2), split.part, now_s - before_s, in_torch)
                self.seen.append(found)
                if split.undecided is not None:
                    split.undecided.append(found)
            before_s = now_s

        try:
            with _interrupted(sample) if _can_interrupt() else nullcontext():
                yield
        finally:
            self.total_s += time.perf_counter() - begun_s


def _can_interrupt() -> bool:
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
def _interrupted(sample: Callable[[], None]) -> Iterator[None]:
    """Call `sample` every EVERY_S in the block, which may take the timer for itself."""
    import torch

    # torch.compile would trace what interrupts compiled code.
    handler = torch.compiler.disable(lambda *_: sample())
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is handler:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
