"""Two processes from a notebook beside torchrun by hand: start, launch, and steps a second.

`python tests/benchmarks/distributed.py [--steps 200] [--processes 2]` prints a table: seconds from
`start` until the workers are ready, seconds of a launch that does nothing, and the seconds of a
DDP step in `launch` and under `torchrun`, in alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.processes import workers

ROUNDS = 5


def step_s(steps: int) -> float:
    """Return the seconds of one DDP step of this rank; the group is there."""
    import time

    import torch

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.rand(64, 512, device=device)
    for number in range(steps + 5):
        if number == 5:
            begun_s = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - begun_s) / steps


def by_torchrun(processes: int, steps: int) -> float:
    """Return the same of rank 0 of this file under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(Path(__file__)), "--rank-of-torchrun"]
    command += [f"--steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout.split()[-1])


def as_rank(steps: int) -> None:
    """Run as a rank of torchrun; rank 0 prints the seconds."""
    import torch.distributed as dist

    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    seconds = step_s(steps)
    if dist.get_rank() == 0:
        print(seconds)
    dist.destroy_process_group()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rank-of-torchrun", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of_torchrun:
        as_rank(options.steps)
        return
    begun_s = time.perf_counter()
    workers.started(options.processes, lambda text: None)
    print(f"from start to ready: {time.perf_counter() - begun_s:.1f} s")
    empty = []
    for _ in range(20):
        begun_s = time.perf_counter()
        launch(int)
        empty.append(time.perf_counter() - begun_s)
    print(f"a launch that does nothing: {1e3 * statistics.median(empty):.0f} ms")
    ratios = []
    for _ in range(ROUNDS):
        launched, by_hand = (
            launch(step_s, options.steps),
            by_torchrun(options.processes, options.steps),
        )
        ratios.append(by_hand / launched)
        print(f"a step: {1e3 * launched:.2f} ms launched, {1e3 * by_hand:.2f} ms by torchrun")
    low, high = min(ratios), max(ratios)
    print(f"launched is {statistics.median(ratios):.3f}× as fast ({low:.3f} to {high:.3f})")
    workers.stop()


if __name__ == "__main__":
    main()
