"""Provide the example scripts with options, data, and a training loop under a config."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIGS = Path(__file__).parents[2] / "configs"


def parser_of(
    doc: str | None,
    steps: int,
    config: str = "auto_speed.yaml",
    read: Callable[[str], object] = SpeedConfig.from_yaml,
) -> argparse.ArgumentParser:
    """Return a parser with every script's options; `read` raises SpeedKitError for a bad config."""

    def readable(name: str) -> Path:
        try:
            read(name)
        except SpeedKitError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return Path(name)

    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--config", type=readable, default=CONFIGS / config, help="a YAML file")
    parser.add_argument("--steps", type=positive, default=steps)
    parser.add_argument("--batch", type=positive, default=32)
    return parser


def positive(text: str) -> int:
    """Return the text as a positive integer, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return number


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    options: argparse.Namespace,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.cross_entropy,
) -> list[float]:
    """Train under the plan of `options.config`, print plan and time, and return the losses."""
    model, ctx = apply_speedups(model, SpeedConfig.from_yaml(options.config), optimizer=optimizer)
    print(f"{options.config.name}: {ctx.plan.active_values() or 'nothing to change here'}")
    losses, begun_s = list[torch.Tensor](), time.perf_counter()
    with ctx:
        for _ in range(options.steps):
            x, y = batches()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found = [float(loss) for loss in losses]
    seconds = time.perf_counter() - begun_s
    print(f"{options.steps} steps in {seconds:.1f} s, loss {found[0]:.3f} to {found[-1]:.3f}")
    return found


def drawn(x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], Any]:
    """Return a function that draws random batches, the same in every run."""
    generator = torch.Generator().manual_seed(1)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(x), (batch,), generator=generator)
        return x[chosen].to(DEVICE), y[chosen].to(DEVICE)

    return draw


def images() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return images (N, 3, 32, 32), classes (N,) and the name of the data set.

    The data is CIFAR-10 if torchvision and the files in `data/` exist, else scikit-learn's digits.
    """
    try:
        from torchvision.datasets import CIFAR10

        data = CIFAR10("data", train=True)
        x = torch.from_numpy(data.data).permute(0, 3, 1, 2).float() / 127.5 - 1
        return x, torch.tensor(data.targets), "CIFAR-10"
    except (ImportError, RuntimeError):  # no torchvision, or no data in the folder
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
        x = nn.functional.interpolate(x, (32, 32), mode="bilinear").repeat(1, 3, 1, 1)
        # Without noise, rounding moves all background pixels across a ReLU's bend at once.
        x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        words = "scikit-learn's digits (CIFAR-10 needs torchvision, and its files in data/)"
        return x, torch.from_numpy(digits.target).long(), words
