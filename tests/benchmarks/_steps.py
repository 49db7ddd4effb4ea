"""Steps of many kinds of length, for the program that holds budgets against the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn


class Step:
    """A training step that sleeps before it computes; `seconds(number, fused, bf16)` says how long.

    It counts its calls where no benchmark puts them back, and keeps the longest (`longest_s`) of
    those that ran as they stand (under no dispatch mode, and compiling nothing) and what those
    that compiled took (`compiling_s`).
    """

    def __init__(
        self, seconds: Callable[[int, bool, bool], float], width: int = 8, batch: int = 4
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._x, self._seconds = torch.randn(batch, width), seconds
        self._seen: SimpleQueue[tuple[float, bool]] = SimpleQueue()

    def __call__(self) -> None:
        """One step."""
        began, graphs = time.perf_counter(), _graphs()
        fused = bool(self.optimizer.param_groups[0]["fused"])
        time.sleep(self._seconds(self._seen.qsize(), fused, torch.is_autocast_enabled("cpu")))
        self.model(self._x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        plain = torch._C._len_torch_dispatch_stack() == 0
        took = time.perf_counter() - began
        self._seen.put((took if plain else 0.0, _graphs() > graphs))

    def seen(self) -> tuple[float, float]:
        """The longest step, and what steps that compiled took; seconds."""
        every = [self._seen.get() for _ in range(self._seen.qsize())]
        longest = max((took for took, compiled in every if not compiled), default=0.0)
        return longest, sum(took for took, compiled in every if compiled)


def _graphs() -> int:
    import sys

    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def _steady(seconds: float, fused: float = 0.8, bf16: float = 1.0) -> Callable[..., float]:
    return lambda number, is_fused, is_bf16: (
        seconds * (fused if is_fused else 1.0) * (bf16 if is_bf16 else 1.0)
    )


def _random(seconds: float) -> Callable[..., float]:
    chance = random.SystemRandom()  # its own state, which nobody puts back
    return lambda *given: seconds * chance.uniform(1, 10)


def _kinds() -> dict[str, Callable[[], Step]]:
    every_20th = lambda number, *given: 0.02 * (30 if number % 20 == 19 else 1)  # noqa: E731
    growing = lambda number, *given: min(0.002 * number, 3.0)  # noqa: E731
    first = lambda number, *given: 2.0 if number == 0 else 0.02  # noqa: E731
    return {
        "1 ms": lambda: Step(_steady(0.001)),
        "20 ms": lambda: Step(_steady(0.02)),
        "0.3 s": lambda: Step(_steady(0.3)),
        "1 s": lambda: Step(_steady(1.0)),
        "3 s": lambda: Step(_steady(3.0)),
        "random, 5 to 50 ms": lambda: Step(_random(0.005)),
        "random, 50 to 500 ms": lambda: Step(_random(0.05)),
        "every 20th is 30 times": lambda: Step(every_20th),
        "growing": lambda: Step(growing),
        "the first takes 2 s": lambda: Step(first),
        "30 times slower in bf16": lambda: Step(_steady(0.03, bf16=30.0)),
        "a tenth where fused": lambda: Step(_steady(0.3, fused=0.1)),
        "large products": lambda: Step(_steady(0.0), width=1024, batch=256),
        "a large model": lambda: Step(_steady(0.0), width=4096, batch=4),
    }


KINDS: dict[str, Callable[[], Step]] = _kinds()


def busy() -> Any:
    """Never returns."""
    while True:
        pass
