"""Interleaved ratios for the benchmark programs, and what they ran on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from speedkit_jupyter import Hardware
from speedkit_jupyter.measure.results.statistics import Ratio, paired_ratio
from speedkit_jupyter.plans.planning import describe


def ratio(
    first: Callable[[], object], second: Callable[[], object], rounds: int, block: int = 1
) -> Ratio:
    """Time of `first` divided by time of `second`, in shuffled rounds of `block` calls each."""
    times: dict[str, list[float]] = {"first": [], "second": []}
    pair = [("first", first), ("second", second)]
    for call in (first, second):
        call()
    for _ in range(rounds):
        for name, call in random.sample(pair, 2):
            start = time.perf_counter()
            for _ in range(block):
                call()
            times[name].append(time.perf_counter() - start)
    return paired_ratio(times["first"], times["second"])


def machine(device: str = "cpu") -> str:
    """The line that every table begins with."""
    hardware = Hardware.detect()
    return f"{describe(hardware, device)}, torch {hardware.torch}, Python {hardware.python}"


def shown(found: Ratio) -> str:
    """`1.23 [1.20, 1.26]`."""
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"
