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
# The files of torch's sources that say it.
SAID_BY = (
    b"CPUAllocator.cpp",
    b"SyncActivityProfilerHandler.cpp",
    b"DeviceProperties.cpp",
    b"profiler_kineto.cpp",
)


class Session:
    """What happens in `running()`, or until `end()` in it: `trace` is torch's own object."""

    def __init__(self, **options: Any) -> None:
        from torch.profiler import profile, supported_activities

        self.trace = profile(activities=supported_activities(), **options)
        self.is_on = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block is profiled."""
        from torch.profiler import record_function

        with _level_set(), _unsaid():
            self.trace.start()
            self.is_on = True
            with record_function(BEGINS):
                pass
            try:
                yield
            finally:
                self.end()

    def end(self) -> None:
        """What comes is not. Once is enough."""
        if self.is_on:
            self.is_on = False
            with suppress(RuntimeError):  # before torch 2.13, where another one has ended it
                self.trace.stop()

    @property
    def was_alone(self) -> bool:
        """Whether it has its own: not where the block used another profiler."""
        results: Any = getattr(self.trace.profiler, "kineto_results", None)
        return results is not None and bool(results.events())


@contextmanager
def _level_set() -> Iterator[None]:
    """The profiler's library logs its start and stop to stderr; it reads its level at first use."""
    level = os.environ.get(LOG_LEVEL)
    os.environ[LOG_LEVEL] = level or "99"
    try:
        yield
    finally:
        if level is None:
            del os.environ[LOG_LEVEL]


@contextmanager
def _unsaid() -> Iterator[None]:
    """What is said for our sake on the process's own stderr: that it begins and ends, where it was
    first used without us, and the allocator's warnings of what an earlier step left (a loss,
    gradients). All else that is written there is passed on.
    """
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
