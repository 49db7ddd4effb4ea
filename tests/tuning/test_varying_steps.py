"""A budget holds for steps that do not always take as long, too, on a clock of its own."""

from __future__ import annotations

import random
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark, tune

# Seconds of a step by its number, the time of day, whether it is fused, and chance.
KINDS = {
    "every 20th 30 times as long": lambda n, now, fused, chance: 0.05 * (30 if n % 20 == 19 else 1),
    "longer each time": lambda n, now, fused, chance: min(0.004 * n, 4.0),
    "heavy tails": lambda n, now, fused, chance: min(0.02 * chance.paretovariate(0.9), 20.0),
    "bursts of load": lambda n, now, fused, chance: 0.1 * (8 if now % 3 < 1 else 1),
    "30 times as long fused": lambda n, now, fused, chance: 0.05 * (30 if fused else 1),
}


class Varying:
    """A step of such a kind; keeps its longest time where no benchmark puts it back."""

    def __init__(self, kind, clock):
        torch.manual_seed(0)
        self.network = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        self.seen: SimpleQueue[float] = SimpleQueue()
        x, chance, seconds = torch.rand(2, 4), random.Random(0), KINDS[kind]

        def draw() -> float:  # from a state of its own: the benchmark puts back what it finds
            chance.seed(self.seen.qsize())
            fused = bool(self.optimizer.param_groups[0]["fused"])
            return seconds(self.seen.qsize(), clock.now_s(), fused, chance)

        def step() -> None:
            took = draw()
            self.seen.put(took)
            clock.sleep(took)
            self.network(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.step = step

    @property
    def longest_s(self) -> float:
        """Of all that ran."""
        return max(self.seen.get() for _ in range(self.seen.qsize()))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget_s", [2.0, 5.0, 15.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_comparison_of_varying_steps_ends_within_its_budget_and_the_longest(
    made_time, kind, budget_s
):
    varying = Varying(kind, made_time)
    began = made_time.now_s()
    found = benchmark(
        varying.step,
        "baseline,fused_optimizer,bf16",
        model=varying.network,
        optimizer=varying.optimizer,
        budget_s=budget_s,
    )
    assert made_time.now_s() - began <= 1.25 * budget_s + varying.longest_s
    for one in found.records[1:]:
        told = one.times_s or one.failure or one.why_not_measured
        assert told or not found.baseline.times_s


@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget_s", [2.0, 15.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_search_among_varying_steps_ends_within_its_budget_and_the_longest(
    made_time, kind, budget_s
):
    varying = Varying(kind, made_time)
    began = made_time.now_s()
    tuning = tune(
        varying.step, model=varying.network, optimizer=varying.optimizer, budget_s=budget_s
    )
    assert made_time.now_s() - began <= 1.25 * budget_s + varying.longest_s
    assert not (tuning.helped and kind.startswith("30 times") and "fused" in tuning.winner.name)
