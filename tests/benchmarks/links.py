"""The cost of an all-reduce, of gloo on loopback or of NCCL between the GPUs here.

`python tests/benchmarks/links.py [--processes 2 4]` measures all-reduces of 1 KiB to 64 MiB and
fits, by least squares of the relative error, those of a ring of p processes:
seconds = 2 (p - 1) · (alpha + bytes / p · beta). It prints alpha, the bandwidth 1 / beta, and each
size with its fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

SIZES = [2**power for power in range(10, 27, 2)]
SECONDS_A_SIZE = 1.0
REPEATS = (5, 200)


def measured() -> dict[int, float]:
    """Return the median seconds of an all-reduce by its bytes, the slowest rank's; a rank runs it.

    All ranks meet before each, so that none waits inside the time of another.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        device = torch.device("cuda")
    found = {}
    for size in SIZES:
        tensor, times = torch.zeros(size // 4, device=device), []
        begun_s, repeats = time.perf_counter(), REPEATS[1]
        while len(times) < repeats:
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
            if len(times) == REPEATS[0]:  # all ranks decide alike
                spent = torch.tensor(time.perf_counter() - begun_s, device=device)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                repeats = int(REPEATS[0] * min(40, max(1, SECONDS_A_SIZE / spent.item())))
        slowest = torch.tensor(statistics.median(times), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[size] = slowest.item()
    return found


def fitted(times: dict[int, float], processes: int) -> tuple[float, float]:
    """Return alpha in seconds and beta in seconds per byte, at least 0 each."""
    sizes, seconds = np.array([*times]), np.array([*times.values()])
    steps, share = 2 * (processes - 1), 2 * (processes - 1) / processes
    terms = np.stack([np.full(len(sizes), steps), sizes * share], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(sizes)))[0]
    return max(0.0, float(alpha)), max(0.0, float(beta))


def report(processes: int) -> None:
    """Measure with this number of processes under torchrun, and print the fit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    times = {int(size): s for size, s in json.loads(done.stdout.splitlines()[-1]).items()}
    alpha, beta = fitted(times, processes)
    print(f"{processes} processes: alpha = {1e6 * alpha:.0f} µs, 1/beta = {1e-9 / beta:.2f} GB/s")
    for size, seconds in times.items():
        fit = 2 * (processes - 1) * (alpha + size / processes * beta)
        print(f"  {size / 1024:8.0f} KiB {1e3 * seconds:9.3f} ms, fit {1e3 * fit:9.3f} ms")


def main() -> None:
    """Run the command, or a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    if "RANK" not in os.environ:
        for processes in parser.parse_args().processes:
            report(processes)
        return
    dist.init_process_group()
    times = measured()
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.barrier()
    time.sleep(1)  # gloo's threads let go of their last tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
