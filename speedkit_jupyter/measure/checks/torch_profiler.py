"""torch's profiler, of which a process has one at a time: a second one silently ends the first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LOG_LEVEL = "KINETO_LOG_LEVEL"
STDERR = 2
# Its first event: one that finds nothing else had nothing to find, if this is there.
BEGINS = "speedkit: the profiler begins"
# Files of torch's sources that write to stderr about the profiler, and about memory that an earlier
# step left (a loss, gradients).
SAID_BY = (
    b"CPUAllocator.cpp",
    b"SyncActivityProfilerHandler.cpp",
    b"DeviceProperties.cpp",
    b"profiler_kineto.cpp",
)


class Session:
    """What happens in `running()`: `trace` is torch's own object."""

    def __init__(self, **options: Any) -> None:
        from torch.profiler import profile, supported_activities

        self.trace = profile(activities=supported_activities(), **options)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the block."""
        from torch.profiler import record_function

        level = os.environ.get(LOG_LEVEL)  # the library reads it at its first use
        os.environ[LOG_LEVEL] = level or "99"
        try:
            with _unsaid():
                self.trace.start()
                with record_function(BEGINS):
                    pass
                try:
                    yield
                finally:
                    with suppress(RuntimeError):  # before torch 2.13, where another has ended it
                        self.trace.stop()
        finally:
            if level is None:
                del os.environ[LOG_LEVEL]

    @property
    def was_alone(self) -> bool:
        """Whether it has its own events: not where the block used another profiler."""
        results: Any = getattr(self.trace.profiler, "kineto_results", None)
        return results is not None and bool(results.events())


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep from the process's own stderr what torch writes there for our sake."""
    try:
        descriptor = os.dup(STDERR)
    except OSError:  # closed: nobody sees anything there
        yield
        return
    with tempfile.TemporaryFile() as kept:
        try:
            os.dup2(kept.fileno(), STDERR)
            yield
        finally:
            os.dup2(descriptor, STDERR)
            os.close(descriptor)
            kept.seek(0)
            for line in kept:
                if not any(source in line for source in SAID_BY):
                    os.write(STDERR, line)
