"""Time steps, including their work on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from speedkit_jupyter.machines.devices import synchronize


def now() -> float:
    """Return the current time of the measuring clock in seconds."""
    return time.perf_counter()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Run one step; return its wall-clock seconds, with an idle device before and after it."""
    synchronize(device)
    read_s = time.perf_counter  # bound early, because the step can replace time.perf_counter
    start_s = read_s()
    step()
    synchronize(device)
    return read_s() - start_s
