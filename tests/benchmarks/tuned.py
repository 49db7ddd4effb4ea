"""What `tune()` finds, with its defaults and nothing learned before, on the device at hand.

    python tests/benchmarks/tuned.py [NAME…] [--device cuda]

NAME is a workload of `_workloads.py`; by default those that are large enough for a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
from _nets import images
from _program import machine, nothing_kept
from _workloads import CLASSES, WORKLOADS, classifying, gpt, made, resnet18

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
            print(f"\n{name}\n{made(name, options.device).tuned()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
