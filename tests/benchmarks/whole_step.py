"""How many times as fast a step gets beyond a compiled model: `compile: {scope: step}`.

A transformer of 3 layers in training, in plain torch and interleaved rounds: the compiled model,
its loss and backward pass with it (compiled autograd), and its optimizer's step. Exits 1 where one
of them pays on this machine: SpeedKit declines to compile a whole step, and should not.

    python tests/benchmarks/whole_step.py [--device cuda] [--rounds 60]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from _nets import Block
from _program import exit_code, interleaved_s, interval, machine, markdown, nothing_kept, over
from torch import nn

PAYS = 1.05


def step_of(device: str, compiles_step: bool, compiles_optimizer: bool) -> Callable[[], object]:
    """Return the step of a new model, which compiles when it is called first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128, 4) for _ in range(3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not compiles_optimizer)
    x, run = torch.rand(8, 64, 128, device=device), torch.compile(model)
    update = torch.compile(optimizer.step) if compiles_optimizer else optimizer.step

    def learn() -> None:
        run(x).square().mean().backward()

    if compiles_step:
        with torch._dynamo.config.patch(compiled_autograd=True):
            learn = torch.compile(learn)

    def step() -> None:
        with torch._dynamo.config.patch(compiled_autograd=compiles_step):
            learn()
        update()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    kinds = {
        "compiled model": (False, False),
        "and autograd": (True, False),
        "and optimizer": (False, True),
    }
    steps = {name: step_of(options.device, *kind) for name, kind in kinds.items()}
    first_s = {}
    with nothing_kept():
        for name, step in steps.items():
            begun_s = time.perf_counter()
            step()
            first_s[name] = time.perf_counter() - begun_s
        times = interleaved_s(steps, options.rounds)
    usual, *others = steps
    gains = {name: over(times[usual], times[name]) for name in others}
    print(machine(options.device))
    rows = ((name, f"{first_s[name]:.1f}", interval(gains.get(name))) for name in steps)
    print(markdown(("", "first step, s", "over the compiled model"), *rows))
    return exit_code(
        [f"{name}: {interval(one)}" for name, one in gains.items() if one and one[1] > PAYS]
    )


if __name__ == "__main__":
    sys.exit(main())
