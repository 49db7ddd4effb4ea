"""A graph's C++ kernels are built in one run of the compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import compile_cache, probes
from speedkit_jupyter.torchglue import inductor as torch_private

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compile,
    pytest.mark.skipif(sys.platform != "linux" or not probes.cxx(), reason="g++ on Linux"),
]
COMPILE = SpeedConfig(compile={"enabled": True, "required": True}).alone()


def network() -> nn.Module:
    """A network whose forward and backward pass have several kernels each."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1)
    )


def trained(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(torch.linspace(-1, 1, 24).view(3, 8))
    (output * torch.arange(4)).sum().backward()
    return [output, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Says how many libraries of kernels were built."""
    monkeypatch.setenv(compile_cache.FOLDER, str(tmp_path))
    torch_private.forget_builds()  # of other tests, which would not be built again
    yield lambda: len([*Path(tmp_path).rglob("*.main.so")])
    torch._dynamo.reset()


def test_a_graph_has_one_library_and_the_results_are_the_same_bits(libraries, monkeypatch):
    model = network()
    with apply_speedups(model, COMPILE)[1]:
        joined = trained(model)
        assert libraries() == 2  # the forward and the backward pass
    torch._dynamo.reset()
    monkeypatch.setattr(compile_cache, "_joining_switch", dict)
    model = network()
    with apply_speedups(model, COMPILE)[1]:
        apart = trained(model)
        assert libraries() > 4
    assert all(map(torch.equal, joined, apart))
