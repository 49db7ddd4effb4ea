"""How much of the processors plain calls of a step got."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

# Preemptions in a second: an idle machine shows up to 10 (what sleeps is not preempted), one whose
# cores are all in use by others 80 to 150.
CROWDED = 25


@dataclass
class Processor:
    """Sum the real seconds, the seconds of processor time of all threads, and how often the kernel
    gave a core to another process meanwhile. Zero where the system doesn't tell (Windows).
    """

    real_s: float = 0.0
    used_s: float = 0.0
    preemptions: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what the block takes."""
        begun_s, before = time.perf_counter(), _usage()
        try:
            yield
        finally:
            now = _usage()
            self.real_s += time.perf_counter() - begun_s
            self.used_s += now[0] - before[0]
            self.preemptions += now[1] - before[1]

    @property
    def is_crowded(self) -> bool:
        """Return whether other processes held the cores."""
        return self.preemptions > CROWDED * self.real_s

    @property
    def times_as_long(self) -> float:
        """Return real time by processor time; 1 where the system doesn't tell."""
        return self.real_s / self.used_s if self.used_s else 1.0


def _usage() -> tuple[float, int]:
    with suppress(ImportError):
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF)
        return found.ru_utime + found.ru_stime, found.ru_nivcsw
    return 0.0, 0
