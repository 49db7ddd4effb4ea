"""Train a ResNet on CIFAR-10 or, without CIFAR-10, on scikit-learn's digits.

python notebooks/scripts/resnet.py --config configs/auto_speed.yaml
"""

from __future__ import annotations

import torch
from _common import DEVICE, drawn, images, parser_of, trained
from torch import nn


class Block(nn.Module):
    """Add two convolutions to a shortcut: (N, C, H, W) to (N, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs),
            nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.short(x))


def resnet(width: int = 16, classes: int = 10) -> nn.Module:
    """Return a ResNet with three stages of two blocks: (N, 3, 32, 32) to (N, classes)."""
    sizes = (width, width, 2 * width, 4 * width)
    blocks = []
    for stage in range(3):
        blocks += [Block(sizes[stage], sizes[stage + 1], 1 + (stage > 0))]
        blocks += [Block(sizes[stage + 1], sizes[stage + 1], 1)]
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], classes))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *pool)


def main() -> None:
    """Run the script."""
    options = parser_of(__doc__, steps=150).parse_args()
    x, y, words = images()
    print(f"{words}: {len(x):,} images")
    torch.manual_seed(0)
    model, held_out = resnet().to(DEVICE), len(x) // 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained(model, optimizer, drawn(x[held_out:], y[held_out:], options.batch), options)
    model.eval()
    with torch.no_grad():
        parts = [model(part.to(DEVICE)).argmax(1).cpu() for part in x[:held_out].split(256)]
    right = (torch.cat(parts) == y[:held_out]).float().mean().item()
    print(f"right for {right:.1%} of {held_out:,} images that it has not seen")


if __name__ == "__main__":
    main()
