"""Run torch's profiler once at a time: a second one in the process silently ends the first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.profiler import profile, record_function, supported_activities

STDERR = 2
# The first event of each profile: a profile with this event alone saw a block without events.
BEGINS = "speedkit: the profiler begins"
# Files of torch's sources that write to stderr about the profiler and earlier steps' memory.
SAID_BY = (
    b"CPUAllocator.cpp", b"SyncActivityProfilerHandler.cpp", b"DeviceProperties.cpp",
    b"profiler_kineto.cpp", b"ActivityProfilerController.cpp",
)  # fmt: skip


@contextmanager
def profiled(**options: Any) -> Iterator[Any]:
    """Profile the block; yields torch's own object."""
    trace = profile(activities=supported_activities(), **options)
    with _stderr_filtered():
        trace.start()
        with record_function(BEGINS):
            pass
        try:
            yield trace
        finally:
            with suppress(RuntimeError):  # before torch 2.13, where another has ended it
                trace.stop()


def was_alone(trace: Any) -> bool:
    """Return whether a profile has events; False if the block used another profiler."""
    results = getattr(trace.profiler, "kineto_results", None)
    return results is not None and bool(results.events())


@contextmanager
def _stderr_filtered() -> Iterator[None]:
    """Drop torch's lines about the profiler from the process's stderr."""
    try:
        descriptor = os.dup(STDERR)
    except OSError:  # closed: it shows nothing
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
