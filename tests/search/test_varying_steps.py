"""The budget of a search holds for steps whose times vary."""

from __future__ import annotations

import random
from queue import SimpleQueue

import pytest

from speedkit_jupyter import tune

# Seconds of a step by its number, the time of day, whether it is fused, and chance.
KINDS = {
    "every 20th 30 times as long": lambda n, now, fused, chance: 0.05 * (30 if n % 20 == 19 else 1),
    "longer each time": lambda n, now, fused, chance: min(0.004 * n, 4.0),
    "heavy tails": lambda n, now, fused, chance: min(0.02 * chance.paretovariate(0.9), 20.0),
    "bursts of load": lambda n, now, fused, chance: 0.1 * (8 if now % 3 < 1 else 1),
    "30 times as long fused": lambda n, now, fused, chance: 0.05 * (30 if fused else 1),
}


@pytest.fixture
def varying(work, made_time):
    """`varying(kind)`: the step's model and optimizer by name, the step, and its times so far."""

    def make(kind):
        # The times lie where no benchmark puts them back; chance is drawn from a state of its own.
        seen, chance = SimpleQueue(), random.Random(0)

        def seconds(on):
            chance.seed(seen.qsize())
            took_s = KINDS[kind](seen.qsize(), made_time.now_s(), on.fused, chance)
            seen.put(took_s)
            return took_s

        network, optimizer, step = work(seconds, linear=4)
        return step, {"model": network, "optimizer": optimizer}, seen

    return make


@pytest.mark.sampled(8)
@pytest.mark.parametrize("budget_s", [2.0, 15.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_search_among_varying_steps_ends_within_its_budget_and_the_longest(
    varying, made_time, kind, budget_s
):
    step, parts, seen = varying(kind)
    began = made_time.now_s()
    tuning = tune(step, budget_s=budget_s, **parts)
    longest_s = max(seen.get() for _ in range(seen.qsize()))
    assert made_time.now_s() - began <= 1.25 * budget_s + longest_s
    assert not (tuning.helped and kind.startswith("30 times") and "fused" in tuning.winner.name)
