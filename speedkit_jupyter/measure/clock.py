"""Seconds that a step takes, its work on the device included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished everything that was asked of it; a CPU has already."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one step, synchronized before and after."""
    __tracebackhide__ = True
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start
