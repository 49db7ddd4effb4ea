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
        self._cpu, self._waited = time.process_time(), waited_s()

    def seconds(self, wall_s: float) -> float:
        """At most so many, of `wall_s` since then; 0 where the system does not tell."""
        return held_up_s(waited_s() - self._waited, wall_s, time.process_time() - self._cpu)


def held_up_s(waited_s: float, wall_s: float, cpu_s: float) -> float:
    """What threads waited for a core, as far as other processes can have had one meanwhile.

    Threads of one process may wait for one another, too.
    """
    return max(min(waited_s, _cores() * wall_s - cpu_s, wall_s), 0.0)


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
    `waited_s` are the seconds of the wall clock in which other processes may have held it up;
    `device_s` is taken between two events on the device, and None where it has none.
    """

    def __init__(
        self, device: torch.device, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self.wall_s = self.cpu_s = self.waited_s = 0.0
        self.device_s: float | None = None
        self._device, self._timer = device, timer
        self._events = devices.events(device)

    def begin(self) -> None:
        """Start, once the device is idle."""
        synchronize(self._device)
        if self._events:
            self._events[0].record()
        self._waited = waited_s()
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
        self.waited_s = held_up_s(waited_s() - self._waited, self.wall_s, self.cpu_s)
        if self._events:
            self.device_s = self._events[0].elapsed_time(self._events[1]) / 1e3


def device_in_use() -> torch.device:
    """The accelerator, where there is one; else the CPU."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device
