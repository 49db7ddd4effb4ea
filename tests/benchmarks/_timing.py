"""Measure the seconds of calls in interleaved rounds, and their ratios."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedkit_jupyter.rounds.statistics import Ratio, paired_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Wait for the GPU, if this process uses CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun_s = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - begun_s, result


def interleaved_s(steps: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, list[float]]:
    """Return the seconds of each call, in shuffled rounds after an untimed round."""
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name in random.sample([*steps], len(steps)):
            times[name].append(timed(steps[name])[0])
    return times


def ratio(first: Callable[[], object], second: Callable[[], object], rounds: int) -> Ratio:
    times = interleaved_s({"first": first, "second": second}, rounds)
    return paired_ratio(times["first"], times["second"])


def over(first: Sequence[float], second: Sequence[float]) -> list[float] | None:
    """Return the speed of `second` over `first` as [median, low, high]; None without times."""
    pairs = min(len(first), len(second))
    if not pairs:
        return None
    return listed(paired_ratio(first[:pairs], second[:pairs]))


def listed(found: Ratio | None) -> list[float] | None:
    """Return a ratio as [median, low, high], as rows keep it."""
    return found and [found.median, found.low, found.high]
