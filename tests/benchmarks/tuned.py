"""Time the plans of `tune()` and of a search in sixty lines of torch next to the plain model.

`tune()` has its defaults and nothing learned before. NAME is a workload of `_workloads.py`; by
default, two workloads that are large enough for a GPU are timed.
"""

import sys

import torch
from _nets import images
from _plain_search import plain_search
from _program import machine, nothing_kept, plain_parser
from _side_by_side import interleaved, planned
from _tables import interval
from _timing import DEVICE, over
from _workloads import WORKLOADS, classes, classifying, gpt, made, resnet18

from speedkit_jupyter.search.outcome import Tuning

LARGE = {
    "GPT of 30 M, 16 x 512": lambda: classifying(gpt(), *torch.randint(2000, (2, 16, 512))),
    "ResNet-18, batch 256": lambda: classifying(resnet18(), images(256, 3, 32), classes(256)),
}
WORKLOADS.update(LARGE)


def main() -> int:
    parser = plain_parser(__doc__, device=DEVICE)
    parser.add_argument("names", nargs="*", default=[*LARGE], metavar="NAME")
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
