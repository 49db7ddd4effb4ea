"""The plan of `tune()`, with its defaults and nothing learned before, on the device at hand, and
of a search in sixty lines of plain torch, both interleaved with the plain model.

    python tests/benchmarks/tuned.py [NAME…] [--device cuda]

NAME is a workload of `_workloads.py`; by default the ones large enough for a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
from _nets import images
from _plain_search import plain_search
from _program import interval, machine, nothing_kept, over
from _side_by_side import interleaved, planned
from _workloads import CLASSES, WORKLOADS, classifying, gpt, made, resnet18

from speedkit_jupyter.search.outcome import Tuning

LARGE = {
    "GPT of 30 M, 16 x 512": lambda: classifying(
        gpt(), torch.randint(2000, (16, 512)), torch.randint(2000, (16, 512))
    ),
    "ResNet-18, batch 256": lambda: classifying(
        resnet18(), images(256, 3, 32), torch.randint(CLASSES, (256,))
    ),
}
WORKLOADS.update(LARGE)


def main() -> int:
    """Run the program."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*LARGE], metavar="NAME")
    parser.add_argument("--device", default=found)
    options = parser.parse_args()
    print(machine())
    for name in options.names:
        with nothing_kept():
            tuning = made(name, options.device).tuned()
        print(f"\n{name}\n{tuning}", flush=True)
        with nothing_kept():
            print(over_plain(name, options.device, tuning), flush=True)
    return 0


def over_plain(name: str, device: str, tuning: Tuning) -> str:
    """Return seconds of both searches, and how fast their plans are in the same rounds."""
    plain = plain_search(name, device)
    tuned, forces = planned(name, tuning.config if tuning.helped else None, device)
    steps = {"plain": made(name, device).run, "tuned": tuned, plain.plan: plain.step}
    times, failed = interleaved(steps, forces)
    gains = {label: over(times["plain"], times[label]) for label in times}
    lines = [f"{label}: {interval(gain)} over the plain model" for label, gain in gains.items()]
    lines += [f"{label} {why}" for label, why in failed.items()]
    ours = f"{tuning.seconds - tuning.compiling_s:.0f} + {tuning.compiling_s:.0f}"
    theirs = f"{plain.seconds:.0f} + {plain.compiling_s:.0f}"
    return "\n".join([f"seconds + compiling: {ours}; in sixty lines {theirs}", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
