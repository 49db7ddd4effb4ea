"""Seconds that a step takes, its work on the device included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.devices import synchronize

if TYPE_CHECKING:
    import torch


def now() -> float:
    """Seconds on the clock that measurements go by."""
    return time.perf_counter()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one step, synchronized before and after."""
    __tracebackhide__ = True
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


class Interruptions:
    """Seconds for which other processes may have held up this one since the object was made."""

    def __init__(self) -> None:
        self._begun = _spent()

    def seconds(self) -> float:
        """At most so many: what its threads waited for a core, as far as others can have had one.

        0 where the system does not tell.
        """
        wall_s, cpu_s, waiting_s = (
            after - before for after, before in zip(_spent(), self._begun, strict=True)
        )
        others_s = _cores() * wall_s - cpu_s  # threads of ours may wait for one another, too
        return max(min(waiting_s, others_s, wall_s), 0.0)


def _spent() -> tuple[float, float, float]:
    """Seconds on the wall, on cores, and spent by threads that were ready and waited for a core."""
    return now(), time.process_time(), waited_s()


def waited_s() -> float:
    """By Linux's count of each thread (nanoseconds, second column); 0 elsewhere."""
    waited_ns = 0
    try:
        for thread in os.scandir("/proc/self/task"):
            with open(f"{thread.path}/schedstat") as counts:
                waited_ns += int(counts.read().split()[1])
    except (OSError, IndexError, ValueError):  # another system; a thread that has just ended
        pass
    return waited_ns / 1e9


def _cores() -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Stopwatch:
    """Wall-clock, CPU and device seconds between `begin()` and `end()`.

    `cpu_s` is what this process spent on all its cores until everything was asked of the device;
    `device_s` is taken between two events on the device, and None where it has none.
    """

    def __init__(
        self, device: torch.device, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self.wall_s, self.cpu_s = 0.0, 0.0
        self.device_s: float | None = None
        self._device, self._timer = device, timer
        self._events = devices.events(device)

    def begin(self) -> None:
        """Start, once the device is idle."""
        synchronize(self._device)
        if self._events:
            self._events[0].record()
        self._cpu = time.process_time()
        self._start = self._timer()

    def end(self) -> None:
        """Stop, once the device is idle again."""
        if self._events or self._device.type != "cpu":
            cpu = time.process_time()
            if self._events:
                self._events[1].record()
            synchronize(self._device)
            self.wall_s = self._timer() - self._start
            self.cpu_s = cpu - self._cpu
        else:  # nothing between the last statement and the timer: a `pass` takes nanoseconds
            self.wall_s = self._timer() - self._start
            self.cpu_s = time.process_time() - self._cpu
        if self._events:
            self.device_s = self._events[0].elapsed_time(self._events[1]) / 1e3


def device_in_use() -> torch.device:
    """The accelerator, where there is one; else the CPU."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device
