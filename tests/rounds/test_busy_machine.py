"""Measurements notice and report the load of other processes."""

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from _load import strangers
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds import busy_machine
from speedkit_jupyter.rounds.comparison import Comparison

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.real_time,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/schedstat"), reason="only Linux counts what threads wait"
    ),
]


@pytest.fixture
def held_cores() -> Iterator[None]:
    """Run two busy processes for each core that the tests may use."""
    with strangers(2 * len(os.sched_getaffinity(0))):
        yield


def compared(inner: int) -> Comparison:
    """Compare baseline with a plan under which the step does its work twice."""
    model, x = nn.Linear(64, 64), torch.randn(64, 64)

    def step(ctx) -> None:
        with torch.no_grad():
            for _ in range(inner * (2 if ctx.plan["sdpa"].active else 1)):
                model(x)

    return benchmark(step, "baseline,sdpa:math", model=model, budget_s=6)


@pytest.mark.parametrize("inner", [10, 300])  # with 10, a block has several steps
def test_where_others_hold_the_cores_the_truth_is_inside_and_the_load_said(held_cores, inner):
    found = compared(inner)
    ratio = found.ratio(found.records[1])
    assert ratio.low < 0.65  # the true ratio is 0.5; one interval in twenty may miss it
    assert ratio.high > 0.4
    assert "other programs delayed" in found.busy
    assert "other programs delayed" in repr(found)
    assert found.to_dict()["busy"] == found.busy


def test_a_step_that_sleeps_is_held_up_by_others_alone(monkeypatch):
    waited_s = itertools.count(step=0.002)  # the step's own threads wait for one another
    monkeypatch.setattr(busy_machine, "waited_s", lambda: float(next(waited_s)))
    monkeypatch.setattr(busy_machine, "taken_by_others_s", lambda: 0.0)
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    step = lambda: (time.sleep(0.01), model(x))  # noqa: E731
    found = benchmark(step, "baseline,sdpa:math", model=model, budget_s=2.0)
    assert not found.busy
    assert not any(map(any, [record.waited_s for record in found.records]))


@pytest.mark.parametrize(
    ("taken_s", "held_up_s"),
    [(0.0, 0.0), (0.1, 0.0), (0.3, 0.3), (5.0, 1.0)],
    ids=["none", "little, in a second", "less than was waited", "more"],
)
def test_nothing_waits_longer_for_others_than_these_compute(monkeypatch, taken_s, held_up_s):
    numbers = {"now": 0.0, "waited_s": 0.0, "taken_by_others_s": 0.0, "_cores": 2}
    for name in numbers:
        monkeypatch.setattr(busy_machine, name, functools.partial(numbers.get, name))
    interruptions = busy_machine.Interruptions()
    numbers |= {"now": 1.0, "waited_s": 1.5, "taken_by_others_s": taken_s}
    assert interruptions.seconds(1.0) == pytest.approx(held_up_s, abs=0.01)


def test_a_living_process_of_our_own_is_counted():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        end = time.monotonic() + 30
        while busy_machine._living_children_s() <= 0.1 and time.monotonic() < end:
            time.sleep(0.1)
        child.kill()
        assert time.monotonic() < end
