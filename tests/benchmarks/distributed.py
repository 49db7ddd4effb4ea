"""Compare a DDP step under `launch`, torchrun and Accelerate's `notebook_launcher`.

`python tests/benchmarks/distributed.py [--steps 200] [--processes 2]` prints the seconds until the
workers are ready, and from a cell to the end of rank 0's first steps. In shuffled rounds it times a
DDP step and its exposed communication under each launcher. It also compares FSDP2's bytes on rank 0
with SpeedKit's estimate. Exits 1 if `launch` is slower than another launcher by more than 3 %, or
if the bytes are off by more than 3 %. Takes two to three minutes.
"""

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from _program import plain_parser
from scaling import process_group
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.extras.processes import workers

ROUNDS = 5


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)))


def step_s(steps: int) -> tuple[float, float]:
    """Return the seconds of one DDP step of this rank, and of one that exchanges no gradients."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.parallel.DistributedDataParallel(layers().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.rand(64, 512, device=device)

    def timed() -> float:
        for number in range(steps + 5):
            if number == 5:
                begun_s = time.perf_counter()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return (time.perf_counter() - begun_s) / steps

    exchanging = timed()
    with model.no_sync():
        return exchanging, timed()


def first_step_at() -> float:
    """Make twelve steps with a new model, and return the host's time at their end."""
    step_s(1)
    return time.time()


def sharded_bytes() -> tuple[int, float]:
    """Return rank 0's bytes of training state under FSDP2 after a step, and the estimated bytes."""
    from speedkit_jupyter import SpeedConfig, apply_speedups
    from speedkit_jupyter.extras.processes.distributed import BYTES_PER_PARAMETER
    from speedkit_jupyter.extras.processes.strategy_race import _state_bytes

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = layers().to(device)
    number = sum(one.numel() for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    config = SpeedConfig(distributed="fsdp2").alone()
    with apply_speedups(model, config, optimizer=optimizer)[1]:
        model(torch.rand(8, 512, device=device)).square().mean().backward()
        optimizer.step()
        formula = number * BYTES_PER_PARAMETER / dist.get_world_size()
        return _state_bytes(model, [optimizer]), formula


def elsewhere(launcher: str, processes: int, steps: int) -> tuple[float, float]:
    """Return rank 0's `step_s` under another launcher, which runs this file in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds"
        by_torch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(by_torch if launcher == "torchrun" else []), __file__]
        command += [f"--as={launcher}", f"--steps={steps}", f"--processes={processes}"]
        command += [f"--result={result}"]
        subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        exchanging, alone = result.read_text().split()
    return float(exchanging), float(alone)


def as_rank(steps: int, result: str) -> None:
    """Time steps as a rank of another launcher; rank 0 writes the seconds to `result`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    with process_group():
        seconds = step_s(steps)
        if dist.get_rank() == 0:
            Path(result).write_text(" ".join(map(str, seconds)))


def main() -> int:
    parser = plain_parser(__doc__, steps=200, processes=torch.cuda.device_count() or 2)
    parser.add_argument("--as", dest="launcher", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launcher == "torchrun":
        as_rank(options.steps, options.result)
        return 0
    if options.launcher:
        from accelerate import notebook_launcher

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        given = (options.steps, options.result)
        notebook_launcher(as_rank, given, num_processes=options.processes, use_port=port)
        return 0
    try:
        return compared(options.processes, options.steps)
    finally:
        workers.stop()


def compared(processes: int, steps: int) -> int:
    begun_s = time.perf_counter()
    workers.started(processes, lambda text: None)
    print(f"from start to ready: {time.perf_counter() - begun_s:.1f} s")
    begun_s = time.time()
    first_s = launch(first_step_at) - begun_s
    again_s = statistics.median(-time.time() + launch(first_step_at) for _ in range(5))
    print(f"from a cell to rank 0's first step: {first_s:.2f} s, later {1e3 * again_s:.0f} ms")
    others = ["torchrun"] + ["notebook_launcher"] * (find_spec("accelerate") is not None)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("launch", *others)}
    for number in range(ROUNDS):
        # Start anew, as other launchers do: where memory is placed changes a step by some 5 %.
        workers.stop()
        workers.started(processes, lambda text: None)
        for name in random.Random(number).sample([*found], len(found)):
            is_ours = name == "launch"
            seconds = launch(step_s, steps) if is_ours else elsewhere(name, processes, steps)
            found[name].append(seconds)
    is_slower = False
    print(f"{'':20}{'a step':>10}{'exposed':>10}  launch, compared")
    for name, every in found.items():
        step, alone = (statistics.median(column) for column in zip(*every, strict=True))
        ratios = [one[0] / ours[0] for one, ours in zip(every, found["launch"], strict=True)]
        is_slower |= statistics.median(ratios) < 0.97
        ratio = f"{statistics.median(ratios):.3f}× ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name:20}{1e3 * step:7.2f} ms{max(0.0, 1 - alone / step):10.0%}  {ratio}")
    held, formula = launch(sharded_bytes)
    off = held / formula - 1
    print(f"fsdp2 holds {held / 2**20:.2f} MiB a rank, formula {formula / 2**20:.2f} ({off:+.1%})")
    return int(is_slower or abs(off) > 0.03)


if __name__ == "__main__":
    sys.exit(main())
