"""Use SpeedKit in your own trainer class, with two additional lines.

python notebooks/scripts/trainer.py --config configs/auto_speed.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _common import DEVICE, drawn, images, parser_of
from resnet import resnet
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups


class Trainer:
    """Train a model, with a moving average of weights and a learning-rate schedule."""

    def __init__(self, model: nn.Module, steps: int, config: SpeedConfig | None = None) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        # SpeedKit's first line: plan for the model and optimizer, and apply the plan.
        self.model, self.speed = apply_speedups(model, config, optimizer=self.optimizer)
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch; return the loss."""
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss.detach()

    def fit(self, draw: Callable[[], tuple[torch.Tensor, torch.Tensor]], steps: int) -> list[float]:
        losses = [self.step(*draw()) for _ in range(steps)]
        self.speed.restore()  # SpeedKit's second line
        return [float(loss) for loss in losses]


def main(options: argparse.Namespace | None = None) -> None:
    """Run the script."""
    options = options or parser_of(__doc__, steps=100).parse_args()
    x, y, words = images()
    print(f"{words}: {len(x):,} images")
    torch.manual_seed(0)
    model, config = resnet(width=8).to(DEVICE), SpeedConfig.from_yaml(options.config)
    trainer = Trainer(model, options.steps, config)
    print(
        f"{options.config.name}: {trainer.speed.plan.active_values() or 'nothing to change here'}"
    )
    losses = trainer.fit(drawn(x, y, options.batch), options.steps)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} steps")


if __name__ == "__main__":
    main()
