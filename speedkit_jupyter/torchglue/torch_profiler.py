"""Profile a block, and detect another torch profiler in it, which silently ends the profile."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.profiler import profile, record_function, supported_activities

STDERR = 2
# The first event of each profile: a profile without events was ended by another profiler.
BEGINS = "speedkit: the profiler begins"
# Source files of torch whose messages on stderr are dropped; they are about profiling.
SAID_BY = (
    b"CPUAllocator.cpp", b"SyncActivityProfilerHandler.cpp", b"DeviceProperties.cpp",
    b"profiler_kineto.cpp", b"ActivityProfilerController.cpp",
)  # fmt: skip


@contextmanager
def profiled(**options: Any) -> Iterator[Any]:
    """Profile the block and yield torch's profiler; stderr is filtered, and written at the end."""
    trace = profile(activities=supported_activities(), **options)
    with _stderr_filtered():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of torch 2.11
            trace.start()
        with record_function(BEGINS):
            pass
        try:
            yield trace
        finally:
            with suppress(RuntimeError):  # before torch 2.13, if another profiler ended it
                trace.stop()


def was_alone(trace: Any) -> bool:
    """Return whether a profile has events; False if the block ran another profiler."""
    results = getattr(trace.profiler, "kineto_results", None)
    return results is not None and bool(results.events())


@contextmanager
def _stderr_filtered() -> Iterator[None]:
    """Hold back stderr during the block, then write it without lines from files in SAID_BY."""
    try:
        descriptor = os.dup(STDERR)
    except OSError:  # stderr is closed
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
