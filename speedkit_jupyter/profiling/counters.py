"""What the machine counts of plain calls: its energy, and how much of the processors they got."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.counted_columns import LEAST_S, QUANTITIES

if TYPE_CHECKING:
    import torch


class Counters:
    """Sums of each quantity that is counted on a device, over the calls that are made by it."""

    def __init__(self, device: torch.device) -> None:
        meters = ((quantity.name, quantity.meter(device)) for quantity in QUANTITIES)
        self._meters = {name: read for name, read in meters if read is not None}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counted_s = 0.0

    def counted(self, call: Callable[[], float]) -> float:
        """Make a call, which gives its seconds."""
        __tracebackhide__ = True
        before = {name: read() for name, read in self._meters.items()}
        took_s = call()
        for name, read in self._meters.items():
            self._sums[name] += read() - before[name]
        self._counted_s += took_s
        return took_s

    def each_second(self) -> dict[str, float]:
        """Of the calls' time; nothing where they were too short for counters that move rarely."""
        if self._counted_s < LEAST_S:
            return {}
        return {name: value / self._counted_s for name, value in self._sums.items()}


# Preemptions in a second: an idle machine shows up to 10 (what sleeps is not preempted), one whose
# cores are all in use by others 80 to 150.
CROWDED = 25


@dataclass
class Processor:
    """Real seconds, the seconds of processor time of all threads, and how often the kernel gave a
    core to another process meanwhile. Zero where the system doesn't tell (Windows).
    """

    real_s: float = 0.0
    used_s: float = 0.0
    preemptions: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what the block takes."""
        begun_s, (used_s, preemptions) = time.perf_counter(), _usage()
        try:
            yield
        finally:
            used_now_s, preemptions_now = _usage()
            self.real_s += time.perf_counter() - begun_s
            self.used_s += used_now_s - used_s
            self.preemptions += preemptions_now - preemptions

    @property
    def is_crowded(self) -> bool:
        """Return whether other processes held the cores."""
        return self.preemptions > CROWDED * self.real_s


def _usage() -> tuple[float, int]:
    with suppress(ImportError):
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF)
        return found.ru_utime + found.ru_stime, found.ru_nivcsw
    return 0.0, 0
