"""TorchScript modules that a step uses: what a measurement does to them is undone."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.undo.isolation import isolated

X = torch.randn(4, 3)
# torch.jit is deprecated, and traces warn.
pytestmark = pytest.mark.filterwarnings("ignore")


class Counting(nn.Module):
    """A plain attribute, a buffer that is rebound, and a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Counts its calls."""
        self.calls += 1
        self.seen = self.seen + x.sum(0)
        return self.norm(x)


def scripted() -> Any:
    """`torch.jit.script`."""
    return torch.jit.script(Counting())


def traced() -> Any:
    """`torch.jit.trace`."""
    return torch.jit.trace(nn.Sequential(nn.BatchNorm1d(3)), X, check_trace=False)


def loaded() -> Any:
    """`torch.jit.load`."""
    file = BytesIO()
    torch.jit.save(scripted(), file)
    file.seek(0)
    return torch.jit.load(file)


MADE = pytest.mark.parametrize("make", [scripted, traced, loaded], ids=lambda make: make.__name__)


def held(module: Any) -> dict[str, Any]:
    """What it holds, by value, and the tensors themselves."""
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    found = {name: (id(one), one.dtype, one.tolist()) for name, one in tensors.items()}
    training = [one.training for one in module.modules()]
    return {"training": training, "calls": getattr(module, "calls", None), **found}


@MADE
def test_the_whole_of_a_torchscript_module_is_put_back(make: Callable[[], Any]):
    module = make()
    before = held(module)
    kept = [*module.buffers(), *module.parameters()]  # their ids stay theirs
    with isolated(others=[{"norm": module}]):
        module(X)
        module.double().eval()
        assert held(module) != before
    assert held(module) == before
    assert kept


@MADE
def test_a_benchmark_leaves_a_torchscript_module_beside_the_model_as_it_was(
    make: Callable[[], Any],
):
    norm, model = make(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        model(norm(X)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = held(norm)
    result = benchmark(step, "baseline,threads:1", budget_s=0.05)
    assert [one.failure for one in result.records] == [None, None]
    assert held(norm) == before
