"""Other processes on the cores: they are seen and said, and narrow no interval."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.results.comparison import Comparison

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/schedstat"), reason="only Linux counts what threads wait"
    ),
]


@pytest.fixture
def held_cores() -> Iterator[None]:
    """Two processes for each core, which never pause."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    yield
    for one in others:
        one.kill()
        one.wait()


def compared(inner: int) -> Comparison:
    """A step that does its work once; under the plan twice."""
    model, x = nn.Linear(64, 64), torch.randn(64, 64)

    def step(ctx) -> None:
        with torch.no_grad():
            for _ in range(inner * (2 if ctx.plan["sdpa"].active else 1)):
                model(x)

    return benchmark(step, "baseline,sdpa:math", model=model, budget_s=5.0)


@pytest.mark.parametrize("inner", [10, 300])  # a block of several steps, a step of some ms
def test_where_others_hold_the_cores_the_interval_is_wide_and_the_load_is_said(held_cores, inner):
    found = compared(inner)
    ratio = found.ratio(found.records[1])
    assert ratio.low < 0.5 < ratio.high
    assert ratio.high > 2 * ratio.low
    assert "other processes held up" in found.busy
    assert "other processes held up" in repr(found)


def test_a_busy_result_keeps_its_waiting_when_it_is_saved(held_cores):
    found = compared(10)
    again = Comparison.from_dict(found.to_dict())
    assert again.ratio(again.records[1]) == found.ratio(found.records[1])
    assert again.busy == found.busy
