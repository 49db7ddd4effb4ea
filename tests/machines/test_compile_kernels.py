"""A graph's C++ kernels are built in one run of the compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import compile_cache, compile_kernels, probes
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
    """Return the output and the gradients of one step."""
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
        assert not compile_kernels.BUILDING
    torch._dynamo.reset()
    monkeypatch.setattr(compile_kernels, "switches", dict)
    model = network()
    with apply_speedups(model, COMPILE)[1]:
        apart = trained(model)
        assert libraries() > 4
    assert all(map(torch.equal, joined, apart))


@pytest.mark.thorough
def test_more_kernels_than_one_run_takes_are_built_in_several(libraries, monkeypatch):
    monkeypatch.setattr(compile_kernels, "MOST", 1)
    model = network()
    with apply_speedups(model, COMPILE)[1]:
        assert all(one.isfinite().all() for one in trained(model))
        assert libraries() > 2


def test_a_library_that_could_not_be_built_is_built_at_the_next_call(libraries, monkeypatch):
    once = [RuntimeError("disk full")]

    def load(graph: compile_kernels.Graph) -> None:
        if once:
            raise once.pop()
        usual(graph)

    usual = compile_kernels.Graph.load
    monkeypatch.setattr(compile_kernels.Graph, "load", load)
    compiled = torch.compile(network())
    other = nn.Linear(2, 2)
    with apply_speedups(other, COMPILE)[1]:  # whose switches are the process's
        with pytest.raises(Exception, match="disk full"):
            trained(compiled)
        assert all(one.isfinite().all() for one in trained(compiled))
