"""Beside a profiler of the user's own nothing is profiled, and theirs has all that it had."""

from __future__ import annotations

import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.checks import memory

CPU = torch.device("cpu")


def step() -> None:
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()


def test_the_peak_is_not_known_where_the_step_has_a_profiler_of_its_own():
    def profiled() -> None:
        with torch.profiler.profile() as trace:
            step()
        assert "aten::addmm" in {event.name for event in trace.events()}

    assert memory.needed(profiled, CPU, []).peak_bytes is None
    assert memory.needed(step, CPU, []).peak_bytes > 0


def test_a_profiler_around_a_measurement_goes_on():
    with torch.profiler.profile() as theirs:
        assert memory.needed(step, CPU, []).peak_bytes is None
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert "aten::mm" in {event.name for event in theirs.events()}


def test_a_step_that_profiles_itself_is_compared_like_any_other():
    net = nn.Linear(4, 4)

    def profiled() -> None:
        with torch.profiler.profile():
            net(torch.ones(2, 4)).sum().backward()

    found = benchmark(profiled, "baseline,fused_optimizer", model=net, budget_s=1)
    assert found.baseline.memory is None or found.baseline.memory.peak_bytes is None
