"""Train in fp16 with scaled losses. This works on CPUs too, slowly.

python notebooks/scripts/fp16.py [--config configs/fp16.yaml]
"""

from __future__ import annotations

import torch
from _common import DEVICE, drawn, images, parser_of
from resnet import resnet
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups


def main() -> None:
    """Run the script."""
    options = parser_of(__doc__, steps=60, config="fp16.yaml").parse_args()
    x, y, words = images()
    print(f"{words}: {len(x):,} images")
    torch.manual_seed(0)
    model = resnet(width=8).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, ctx = apply_speedups(model, SpeedConfig.from_yaml(options.config), optimizer=optimizer)
    print(f"{options.config.name}: {ctx.plan.active_values()}")
    draw, losses = drawn(x, y, options.batch), []
    for _ in range(options.steps):
        inputs, targets = draw()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # computes gradients of the scaled loss, then unscales them
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clips unscaled gradients
        optimizer.step()  # updates nothing if a gradient overflowed
        optimizer.zero_grad()
        losses.append(loss.item())
    scale = ctx.grad_scaler.get_scale() if ctx.grad_scaler.is_enabled() else 1.0
    ctx.restore()
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, the scale ends at {scale:,.0f}")


if __name__ == "__main__":
    main()
