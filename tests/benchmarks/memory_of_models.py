"""Resident memory over benchmarks of one large model after another, each deleted after its own.

    python tests/benchmarks/memory_of_models.py [number of models, 14] [their size in MB, 100]

Prints resident memory after each, once malloc has given back what it keeps for the next time; it
must stay flat without the garbage collector, which is off.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import torch
from torch import nn

from speedkit_jupyter import benchmark


def measured(megabytes: float) -> None:
    """One training step of a model of this size under two plans; then all is the caller's to drop.

    SGD has no state of its own, so that the model, its gradients and copies are what there is.
    """
    width = round((megabytes * 2**20 / 4 / 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.rand(8, width)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    benchmark(step, "baseline,fused_optimizer", budget_s=0.5)


def main(number: int = 14, megabytes: float = 100) -> None:
    """Measure that many, print what is resident after each, and how much it grew after the 2nd."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # the first one imports Dynamo, with cycles
    gc.collect()
    gc.disable()
    seen = []
    for index in range(number):
        measured(megabytes)
        ctypes.CDLL(None).malloc_trim(0)
        seen.append(psutil.Process().memory_info().rss / 2**20)
        print(f"{index + 1:3}  {seen[-1]:7.0f} MB", flush=True)
    grown = max(seen[2:]) - seen[1]
    print(f"grown by {grown:.0f} MB from the 2nd on, with models of {megabytes:.0f} MB")
    if grown > megabytes:
        sys.exit("models stay alive")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
