"""Learn one step of the heat equation, then repeat the step many times with `rollout`.

python notebooks/scripts/rollout.py [--config configs/rollouts/auto.yaml] [--steps 500] [--batch 1]
"""

from __future__ import annotations

import argparse
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml
from _common import DEVICE, parser_of
from torch import nn

from speedkit_jupyter import SpeedKitError, rollout

DT, SIZE = 0.05, 128


def fields(batch: int, size: int = SIZE) -> torch.Tensor:
    """Return smooth random temperatures on a torus, (batch, 1, size, size)."""
    coarse = torch.randn(batch, 1, size // 8, size // 8)
    smooth = nn.functional.interpolate(coarse, (size, size), mode="bicubic")
    return smooth.to(DEVICE)


def change(x: torch.Tensor) -> torch.Tensor:
    """Return the Laplacian of `x`, the time derivative in the heat equation."""
    return sum(x.roll(by, dim) for dim in (2, 3) for by in (-1, 1)) - 4 * x  # type: ignore[no-any-return]


def learned(width: int = 16, steps: int = 500) -> nn.Module:
    """Train a network to compute `change`, on random fields, and return it."""
    torch.manual_seed(0)
    same = {"padding": 1, "padding_mode": "circular"}
    operator = nn.Sequential(
        nn.Conv2d(1, width, 3, **same), nn.GELU(), nn.Conv2d(width, width, 3, **same), nn.GELU(),
        nn.Conv2d(width, 1, 3, **same),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.Adam(operator.parameters(), lr=3e-3)
    for _ in range(steps):
        x = fields(4, 16)
        loss = nn.functional.mse_loss(operator(x), change(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the operator is off by {(loss / change(x).square().mean()).sqrt().item():.1%}")
    return operator.eval()


def settings_of(file: str | Path) -> dict[str, Any]:
    """Return a file's options for rollout(). Raises SpeedKitError for an unsuitable file."""
    try:
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        signature(rollout).bind_partial(**settings)
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise SpeedKitError(f"{file} has no options of rollout(): {error}") from None
    return settings  # type: ignore[no-any-return]


def main(options: argparse.Namespace | None = None) -> None:
    """Run the script."""
    if options is None:
        parser = parser_of(__doc__, steps=500, config="rollouts/auto.yaml", read=settings_of)
        parser.set_defaults(batch=1)
        options = parser.parse_args()
    settings = settings_of(options.config)
    operator, x0 = learned(), fields(options.batch)
    found = rollout(operator, x0, options.steps, ("residual", DT), **settings)
    print(found)


if __name__ == "__main__":
    main()
