"""Parameters that are in no model: a temperature, a learned weight, what is updated by hand.

The reference takes them to float64 like a model's own, so that a wrong plan is told from a right
one by as much; afterwards they are what they were, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.checks.reference import in_float64


class Off(torch.autograd.Function):
    """Its gradient is off by a factor: a wrong plan."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Net(nn.Module):
    """Whose gradients are off by a factor wherever autocast is on."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(16, 32), nn.Linear(32, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        factor = self.factor if torch.is_autocast_enabled("cpu") else 1.0
        return self.second(Off.apply(hidden, factor))


class Weighted(nn.Module):
    """A loss that learns its weight; no output of it is a model's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs * self.weight.exp(), target)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_the_optimizer() -> tuple[list[Any], Loss]:
    free = nn.Parameter(torch.tensor(1.0))
    return [free], lambda y, t: F.cross_entropy(y * free.exp(), t)


def in_a_list() -> tuple[list[Any], Loss]:
    free = [nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(8))]
    return free, lambda y, t: F.cross_entropy(y * free[0] + free[1], t)


def of_a_loss() -> tuple[list[Any], Loss]:
    loss = Weighted()
    return list(loss.parameters()), loss


def of_another_model() -> tuple[list[Any], Loss]:
    head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    return list(head.parameters()), lambda y, t: F.cross_entropy(head(y), t)


def in_half() -> tuple[list[Any], Loss]:
    free = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    return [free], lambda y, t: F.cross_entropy(y * free.exp(), t)


def complex_one() -> tuple[list[Any], Loss]:
    free = nn.Parameter(torch.tensor([1.0 + 0.5j] * 8))
    return [free], lambda y, t: F.cross_entropy((y * free).abs(), t)


def in_double() -> tuple[list[Any], Loss]:
    free = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    return [free], lambda y, t: F.cross_entropy(y * free.exp(), t)


def by_hand() -> tuple[list[Any], Loss]:
    free = torch.ones((), requires_grad=True)

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if free.grad is not None:
                free.sub_(free.grad, alpha=0.01)
                free.grad = None
        return F.cross_entropy(y * free.exp(), t)

    return [], loss


def buffer_like() -> tuple[list[Any], Loss]:
    mean = torch.zeros(8)

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return F.cross_entropy(y - mean, t)

    return [], loss


KINDS = [
    in_the_optimizer, in_a_list, of_a_loss, of_another_model, in_half, complex_one, in_double,
    by_hand, buffer_like,
]  # fmt: skip


def judged(kind: Callable[[], tuple[list[Any], Loss]], factor: float) -> str:
    """The verdict on bf16, measured; nothing of ours has warned."""
    torch.manual_seed(0)
    net = Net(factor)
    free, loss_of = kind()
    optimizer = torch.optim.SGD([*net.parameters(), *free], 1e-3)
    x, target = torch.randn(16, 16), torch.randint(0, 8, (16,))
    before = [one.detach().clone() for one in (*net.parameters(), *free)]

    def step() -> float:
        loss = loss_of(net(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison = benchmark(step, "baseline,bf16", budget_s=2)
    after = [*net.parameters(), *free]
    assert all(one.dtype == old.dtype for one, old in zip(after, before, strict=True))
    assert all(map(torch.equal, after, before))
    assert all(one.grad is None for one in after)
    accuracy = comparison.records[1].accuracy
    assert accuracy is not None
    return accuracy.verdict


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
def test_right_ones_are_right_and_a_gradient_off_by_a_third_is_wrong(made_time, kind):
    assert judged(kind, 1.0) == "rounding"
    assert judged(kind, 1.35) in ("wrong", "not checked")


def test_tensors_are_taken_to_float64_themselves_and_put_back_to_their_own_memory():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(8, 3)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    held = [*model.parameters(), *model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    before = [(t.data_ptr(), t.dtype, t.clone()) for t in held]
    with in_float64([model], [optimizer]):
        assert step().dtype is torch.float64
        assert model[0].weight.dtype is model[0].weight.grad.dtype is torch.float64
        assert model[0].weight.is_leaf
    for tensor, (address, dtype, values) in zip(held, before, strict=True):
        assert (tensor.data_ptr(), tensor.dtype) == (address, dtype)
        assert tensor.dim() == 0 or torch.equal(tensor, values)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_data_in_float32_meets_every_layer(layer):
    model, x = layer(6, 6), torch.randn(4, 2, 6)
    with in_float64([model], []), torch.no_grad():
        out = model(x)[0]
        kept = torch.zeros(6)
        kept.lerp_(out[0, 0], 0.5)
    assert out.dtype is torch.float64
    assert kept.dtype is torch.float32
    assert torch.allclose(kept.double(), out[0, 0] / 2)
