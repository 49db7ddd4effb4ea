"""Where a step takes long, only its beginning has a reference: the rest is judged by that.

What is nothing but noise there, the gradient of a bias in front of batch norm say, says nothing of
later results, of which smaller samples are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import examined, word
from torch import nn

from speedkit_jupyter.measure.checks.judging import controls

pytestmark = pytest.mark.usefixtures("one_thread")


def convolution() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 300),
    )  # fmt: skip
    return model, torch.rand(64, 1, 8, 8)


def linear() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 300))
    return model, torch.rand(32, 32)


class Attending(nn.Module):
    """The bias of its keys moves every score alike: its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


def attention() -> tuple[nn.Module, torch.Tensor]:
    return Attending(), torch.rand(8, 16, 64)


class Tokens(nn.Module):
    """Most rows of its embedding are never asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(500, 32), nn.Linear(32, 300)
        self.norm = nn.GroupNorm(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.tokens(x).transpose(1, 2)).transpose(1, 2))


def embedding() -> tuple[nn.Module, torch.Tensor]:
    return Tokens(), torch.randint(0, 50, (4, 16))


NETS = [convolution, linear, attention, embedding]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Broken(nn.Module):
    """Under autocast its outputs are too large by a tenth from its third call on, which is in the
    third step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_wrong = self.calls > 2 and torch.is_autocast_enabled("cpu")
        return self.model(x) * (1.1 if is_wrong else 1.0)


def training(net: Callable[[], Any], kind: str, wrapped: type[nn.Module] | None = None) -> Any:
    torch.manual_seed(3)
    model, x = net()
    model = model if wrapped is None else wrapped(model)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short enough for three of them, too long for references of all."""
    monkeypatch.setattr(controls, "WHOLE", 1)


@pytest.mark.usefixtures("long_steps")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_later_steps_of_a_sound_plan_are_checked_and_right(net, kind):
    (_, record) = examined(*_with(["bf16"], *training(net, kind))).records
    assert word(record) == "rounding", record.accuracy
    assert "only what comes before is checked" not in record.accuracy.reason


@pytest.mark.usefixtures("long_steps")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("net", NETS)
def test_what_goes_wrong_in_the_third_step_is_found(net):
    (_, record) = examined(*_with(["bf16"], *training(net, "SGD", Broken))).records
    assert word(record) == "wrong", record.accuracy
    assert "in step 3" in record.accuracy.reason


def _with(words: list[str], step: Any, model: Any, optimizer: Any) -> tuple[Any, ...]:
    return step, words, model, optimizer
