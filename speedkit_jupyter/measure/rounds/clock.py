"""Seconds that a step takes, its work on the device included."""

from __future__ import annotations

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
