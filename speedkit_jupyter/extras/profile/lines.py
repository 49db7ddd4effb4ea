"""Which of the user's own lines the time goes to.

A timer interrupts the measured thread. A signal's handler runs in the thread that it interrupts,
between two steps of Python's interpreter, so that it reads frames of its own thread only. (Frames
of another thread end while they are read, and Python crashes.) Time between two samples counts for
the second one: a long operation that calls nothing counts for the next line that does.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from speedkit_jupyter.extras.profile.split import LineSample, Part, Recorder
from speedkit_jupyter.support.source_lines import Spot, user_spot
from speedkit_jupyter.torchglue.confinement import patched

# Seconds between two samples. One takes some 10 µs.
EVERY_S = 0.001
# A sample counts for at most so many times its own time: a part may be seen only once.
MOST = 4.0


@dataclass
class LineTimes:
    """Shares of a step, 0 to 1: `own` are those of the user's lines, without other lines that they
    call, by part of the step; `python` is what of them takes place outside of torch.
    """

    own: Mapping[tuple[Spot, Part], float] = field(default_factory=dict)
    python: Mapping[Spot, float] = field(default_factory=dict)

    @staticmethod
    def of(samples: Sequence[LineSample], shares: Mapping[Part, float]) -> LineTimes:
        """Return those of the samples; `shares` are those of the parts by the split."""
        own = defaultdict[tuple[Spot, Part], float](float)
        python = defaultdict[Spot, float](float)
        seen_s = defaultdict[Part, float](float)
        for sample in samples:
            seen_s[sample.part] += sample.seconds
        most = MOST / (sum(seen_s.values()) or 1.0)
        for sample in samples:
            part_share = shares.get(sample.part, 0.0)
            share = sample.seconds * min(part_share / (seen_s[sample.part] or 1.0), most)
            if sample.spot is not None:
                own[sample.spot, sample.part] += share
                if sample.part in ("rest", "data") and not sample.in_torch:
                    python[sample.spot] += share
        return LineTimes(own, python)

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


@contextmanager
def sampled(recorder: Recorder) -> Iterator[None]:
    """Have a timer note into the recorder's split which line is at work in this thread.

    Nothing is noted outside the main thread, on Windows, and beside a timer of the user's.
    """
    is_free = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
        and not signal.getitimer(signal.ITIMER_REAL)[0]
    )
    if not is_free:
        yield
        return
    before_s = 0.0

    def sample(*_: object) -> None:
        nonlocal before_s
        now_s = time.perf_counter()
        if recorder.part != "overhead":
            found = LineSample(user_spot(2), recorder.part, now_s - before_s)
            recorder.split.samples.append(found)
        before_s = now_s  # also between two calls: the first sample counts as much as any

    def without_samples(set_handler: Callable[..., Any]) -> Callable[..., Any]:
        def own(number: int, handler: Any) -> Any:
            if number == signal.SIGALRM:  # a late sample would ring as the block's own timer
                signal.setitimer(signal.ITIMER_REAL, 0)
            return set_handler(number, handler)

        return own

    handler = torch.compiler.disable(sample)  # it would trace what interrupts compiled code
    before, before_s = signal.signal(signal.SIGALRM, handler), time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        with patched(signal, "signal", without_samples):
            yield
    finally:
        if signal.getsignal(signal.SIGALRM) is handler:  # the block may take it for itself
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
