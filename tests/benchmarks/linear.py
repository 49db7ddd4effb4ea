"""`Linear(8192, 8192)` x 3, batch 512, on a CUDA device: torch's defaults against `auto`.

Interleaved in shuffled rounds, both from the same weights. Without a CUDA device it says so.

    python tests/benchmarks/linear.py [--budget 30]
"""

from __future__ import annotations

import argparse
import sys

import torch
from _program import machine
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.report.comparison_report import comparison_report


def main() -> int:
    """Run the program; exits 1 where `auto` is slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=30.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("linear.py: no CUDA device here, nothing measured")
        return 0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 8192, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = benchmark(
        step, "baseline,auto", model=model, optimizer=optimizer, budget_s=options.budget
    )
    print(machine("cuda"))
    print(comparison_report(found))
    return 1 if found.verdict(found.records[1]) == "slower" else 0


if __name__ == "__main__":
    sys.exit(main())
