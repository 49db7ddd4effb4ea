"""Does a benchmark leave another thread's work alone? Bit for bit, again and again.

`python tests/benchmarks/threads.py --runs 50` prints a line for each kind of training on a model of
its own, and exits with an error if one run differs from the same work alone. What another thread
trains and the measured step reaches too is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from second_thread import KINDS, clipped, network, training

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.results.comparison import Comparison

VARIANTS = "baseline,bf16,fp16,fused_optimizer,threads:1"
BUDGET_S = 1.0


def disturbed(kind: str) -> str:
    """What one benchmark beside one thread has done to either; empty where nothing."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with training(*KINDS[kind]):
            found = benchmark(lambda: clipped(model, optimizer), VARIANTS, budget_s=BUDGET_S)
    except AssertionError:
        return "the other thread's training"
    return _failed(found)


def _failed(found: Comparison) -> str:
    for one in found.records:
        if one.failure or (one.accuracy is not None and one.accuracy.verdict == "wrong"):
            return f"{one.name}: {one.failure or one.accuracy.reason}"
    return ""


def main() -> int:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    kinds = [*KINDS]
    good = dict.fromkeys(kinds, 0)
    for number in range(runs):
        kind = kinds[number % len(kinds)]
        what = disturbed(kind)
        good[kind] += not what
        if what:
            print(f"{kind}: disturbed {what}", flush=True)
    for number, kind in enumerate(kinds):
        print(f"{kind:23} {good[kind]} of {len(range(number, runs, len(kinds)))} undisturbed")
    print(f"{sum(good.values())} of {runs}, torch {torch.__version__}")
    return int(sum(good.values()) < runs)


if __name__ == "__main__":
    sys.exit(main())
