"""`channels_last` on this device, over five small convolutional networks: the rule behind `auto`.

Exits 1 where it is proven to lose more than 2 % anywhere.

    python tests/benchmarks/channels_last.py [--budget 4]
"""

from __future__ import annotations

import argparse
import sys

import torch
from _ratios import machine
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import benchmark


def block(inputs: int, outputs: int, stride: int = 1, groups: int = 1, kernel: int = 3):
    """Convolution, batch norm, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """A short ResNet."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = block(3, width, 2, kernel=7)
        self.blocks = nn.ModuleList(
            nn.Sequential(block(width, width), block(width, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """(N, 3, H, W) to (N, 10)."""
        x = F.max_pool2d(self.stem(x), 2)
        for one in self.blocks:
            x = F.relu(x + one(x))
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):
    """A short MobileNet."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        pairs = [(block(width, width, groups=width), block(width, width, kernel=1))] * 5
        self.body = nn.Sequential(block(3, width, 2), *(one for pair in pairs for one in pair))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """(N, 3, H, W) to (N, 10)."""
        return self.head(self.body(x).mean((2, 3)))


class UNet(nn.Module):
    """One step down, one up, group norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = block(3, width), block(width, 2 * width, 2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(2 * width, 10, 1)

    def forward(self, x):
        """(N, 3, H, W) to (N, 10)."""
        first = self.first(x)
        up = F.silu(self.norm(self.up(self.down(first))))
        return self.last(torch.cat([first, up], 1)).mean((2, 3))


class Small(nn.Module):
    """LeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Linear(400, 10)

    def forward(self, x):
        """(N, 3, 28, 28) to (N, 10)."""
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        return self.head(F.max_pool2d(F.relu(self.b(x)), 2).flatten(1))


NETWORKS = {
    "residual, batch 8": (Residual, (8, 3, 64, 64)),
    "residual, batch 1": (Residual, (1, 3, 64, 64)),
    "depthwise": (Depthwise, (16, 3, 64, 64)),
    "U-Net": (UNet, (8, 3, 64, 64)),
    "LeNet": (Small, (32, 3, 28, 28)),
}


def measured(build, shape, training: bool, budget_s: float) -> dict:
    """The record of `channels_last` against `baseline`."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build().to(device).train(training)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(shape, device=device)
    y = torch.randint(0, 10, shape[:1], device=device)

    def train() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def infer() -> None:
        with torch.no_grad():
            model(x)

    comparison = benchmark(
        train if training else infer,
        "baseline,channels_last",
        model=model,
        optimizer=optimizer if training else None,
        budget_s=budget_s,
    )
    return comparison.to_dict()["variants"][1]


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=4.0)
    options = parser.parse_args()
    print(machine("cuda" if torch.cuda.is_available() else "cpu"))
    losses = 0
    for name, (build, shape) in NETWORKS.items():
        for training in (True, False):
            row = measured(build, shape, training, options.budget)
            losses += row["high"] is not None and row["high"] < 0.98
            what = "training" if training else "inference"
            interval = f"[{row['low']:.2f}, {row['high'] or float('inf'):.2f}]"
            print(f"{name:20} {what:10} {row['speedup']:.2f} {interval}  {row['verdict']}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
