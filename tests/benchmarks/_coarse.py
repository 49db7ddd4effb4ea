"""Faults of float32 kernels in nets whose sound kernels in channels_last round coarsely.

Behind batch norm some activations tip over, and move gradients by a percent or more: what is wrong
beside that must be seen all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _planted import Made, Planted, Spoiled, nothing
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

PLAN = "channels_last"
WIDTH, CLASSES, BATCH = 32, 10, 64
# What is wrong by so little is seen where it is more than one channel.
LEAST = 1.05
# With these weights and digits activations tip over in channels_last.
TIPS = 4
Spoil = Callable[[torch.Tensor], torch.Tensor]


def unit(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()


class Between(nn.Module):
    """The identity, whose gradient is spoiled while the model is in channels_last."""

    def __init__(self, spoil: Spoil) -> None:
        super().__init__()
        self.spoil, self.is_wrong = spoil, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spoiled.apply(x, self.spoil) if self.is_wrong else x


def net(spoil: Spoil) -> nn.Sequential:
    return nn.Sequential(
        *unit(1, WIDTH), *unit(WIDTH, WIDTH), Between(spoil), nn.MaxPool2d(2),
        *unit(WIDTH, 2 * WIDTH), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * WIDTH, CLASSES),
    )  # fmt: skip


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    images = torch.tensor(found.images[:BATCH], dtype=torch.float32)[:, None] / 16
    return functional.interpolate(images, scale_factor=2), torch.tensor(found.target[:BATCH])


def is_last(model: nn.Sequential) -> bool:
    """Whether the plan is in force."""
    return not model[3].weight.is_contiguous()


def of_channels(gradient: torch.Tensor, first: int, end: int, factor: float) -> torch.Tensor:
    """So many times as large in some channels: rows of a weight, or channels of an image."""
    wrong, dimension = gradient.clone(), int(gradient.dim() == 4 and gradient.shape[0] == BATCH)
    wrong.narrow(dimension, first, end - first).mul_(factor)
    return wrong


def training(
    activation: Spoil | None = None,
    weight: Spoil | None = None,
    stays: slice | None = None,
    seed: int = TIPS,
) -> Made:
    """`activation` spoils a gradient within the net, `weight` that of one convolution, `stays` are
    its rows that are not updated.
    """
    torch.manual_seed(seed)
    model = net(activation or nothing)
    x, y = digits()
    between, spoiled = model[6], model[3].weight
    if weight is not None:
        spoiled.register_hook(lambda gradient: weight(gradient) if is_last(model) else gradient)

    class Forgetting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            held = spoiled.detach().clone()
            super().step(closure)
            if stays is not None and is_last(model):
                with torch.no_grad():
                    spoiled[stays] = held[stays]

    optimizer = Forgetting(model.parameters(), 1e-3)

    def step() -> Any:
        between.is_wrong = activation is not None and is_last(model)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer, PLAN


def _spoils(factor: float) -> dict[str, Spoil]:
    return {
        "one channel": partial(of_channels, first=5, end=6, factor=factor),
        "a quarter of the channels": partial(of_channels, first=8, end=16, factor=factor),
        "all channels": partial(of_channels, first=0, end=WIDTH, factor=factor),
    }


COARSE = tuple(
    Planted("coarse kernels", f"gradient of {what}, {where} is {factor} times as large",
            partial(training, **{where: spoil}))
    for where in ("weight", "activation")
    for factor in (0.9, LEAST, 1.3)
    for what, spoil in _spoils(factor).items()
    if what != "one channel" or factor != LEAST
) + tuple(
    Planted("coarse kernels", f"{what} of a weight is not updated", partial(training, stays=rows))
    for what, rows in {"a row": slice(5, 6), "a quarter": slice(8, 16)}.items()
)  # fmt: skip
