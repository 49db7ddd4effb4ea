"""A measurement keeps no model alive."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark

pytestmark = pytest.mark.usefixtures("made_time")


@pytest.fixture
def no_collector():
    """Off, so that only counting references frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def training(fails: bool = False) -> tuple[Any, weakref.ref[Any], weakref.ref[Any]]:
    """A step and weak references to its model and a parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 8)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            raise ValueError("mine")

    return step, weakref.ref(model), weakref.ref(model[0].weight)


@pytest.mark.parametrize("fails", [False, True])
def test_a_benchmark_frees_its_models(no_collector, fails):
    training()[0]()  # torch's own modules are loaded at the first step
    step, model, weight = training(fails)
    with contextlib.suppress(ValueError):
        benchmark(step, "baseline,fused_optimizer,channels_last", budget_s=0.05)
    del step
    assert (model(), weight()) == (None, None)
