"""The machine's peak rates: floating-point operations and bytes per second, measured.

They are the two lines of the roofline of Williams, Waterman and Patterson (Communications of the
ACM 52(4), 2009): the fastest rate of large matrix products and convolutions, and of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from speedkit_jupyter.rounds import clock


@dataclass(frozen=True)
class Peak:
    """Operations per second, of products or convolutions in one dtype; bytes per second."""

    flops_per_s: float
    bytes_per_s: float


def peak(device: torch.device, dtype: torch.dtype, setting: str = "") -> Peak:
    """Return the rates, measured once a session for each device, dtype and `setting` (as tf32).

    The flags and threads that are in force count; call it inside the plan.
    """
    return _peak(device, dtype, setting, torch.get_num_threads())


def eager() -> Any:
    """Run compiled code as plain PyTorch, operation by operation, in this context."""
    return torch.compiler.set_stance("force_eager")


@cache
def _peak(device: torch.device, dtype: torch.dtype, setting: str, threads: int) -> Peak:
    """Try products and convolutions: their kernels may use other engines."""

    def make(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device, dtype=dtype)

    def product(size: int) -> tuple[int, Callable[[], object]]:
        a, out = make(size, size), make(size, size)
        return 2 * size**3, partial(torch.mm, a, a, out=out)

    def convolution(batch: int) -> tuple[int, Callable[[], object]]:
        shapes = (batch, 128, 28, 28), (128, 128, 3, 3)  # as in the middle of a ResNet
        given = [make(*shape).to(memory_format=torch.channels_last) for shape in shapes]
        return 2 * batch * 28**2 * 128**2 * 3**2, partial(torch.conv2d, *given, padding=1)

    best = 0.0
    for work, sizes in ((product, (512, 1024, 2048, 4096, 8192)), (convolution, (8, 64, 256))):
        for operations, call in map(work, sizes):
            seconds = _fastest_s(call, device)
            best = max(best, operations / seconds)
            if seconds >= 0.02:  # long enough for the peak
                break
    copied_bytes = 2**27  # more than most caches hold
    source = torch.zeros(copied_bytes, device=device, dtype=torch.uint8)
    copy = partial(torch.empty_like(source).copy_, source)
    return Peak(best, 2 * copied_bytes / _fastest_s(copy, device))


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the best time of many calls, for 0.05 s: disturbances only make calls slower."""
    best, end = float("inf"), time.perf_counter() + 0.05
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, clock.timed(call, device))
    return best
