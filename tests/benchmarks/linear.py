"""`Linear(8192, 8192)` x 3, batch 512, on a CUDA device: torch's defaults against `auto`, in ms.

10 warm-up and 100 synchronized steps each, cudnn.benchmark off. Without a CUDA device it says so.

    python tests/benchmarks/linear.py
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from _ratios import machine
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups


def median_ms(step) -> float:
    """Median of 100 synchronized steps after 10 of warm-up."""
    times = []
    for number in range(110):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= 10:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> int:
    """Run the program."""
    if not torch.cuda.is_available():
        print("linear.py: no CUDA device here, nothing measured")
        return 0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 8192, device="cuda")

    def baseline() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def fast() -> None:
        with context.autocast():
            loss = model(x).square().mean()
        context.grad_scaler.scale(loss).backward()
        context.grad_scaler.step(optimizer)
        context.grad_scaler.update()
        optimizer.zero_grad()

    print(machine("cuda"))
    before = median_ms(baseline)
    with apply_speedups(model, SpeedConfig(), optimizer=optimizer)[1] as context:
        after = median_ms(fast)
    print(f"baseline {before:.2f} ms, auto {after:.2f} ms: {before / after:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
