"""Predict the efficiency of ddp, fsdp2 and hybrid on up to 1,024 GPUs, for docs/scaling.md.

`python tests/benchmarks/scaling.py [--tokens 8192]` computes efficiency from assumed rates and
measures nothing. Efficiency is compute time divided by compute plus exposed communication time.

`--links 2 4` instead measures all-reduces of 1 KiB to 64 MiB between 2 and between 4 processes,
with gloo on loopback or NCCL between the GPUs here. It fits the time of a ring of p processes,
2 (p - 1) · (alpha + bytes / p · beta) seconds, by least squares of the relative error. It prints
alpha, the bandwidth 1 / beta, and each size with its fit.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import torch
import torch.distributed as dist
from _program import plain_parser
from _tables import markdown
from _timing import DEVICE, timed

# Assumptions for one GPU and direction: seconds of a hop, and seconds per byte in a collective.
# The links' peaks are 450 GB/s (NVLink 4) and 400 Gbit/s (one InfiniBand NDR card for each GPU).
NVLINK_S, NVLINK_BETA = 3e-6, 1 / 300e9
FABRIC_S, FABRIC_BETA = 10e-6, 1 / 40e9
ON_HOST = 8
FLOPS = 400e12  # reached, out of 989e12 for bf16 on an H100
MEMORY_BYTES, SHARE = 80e9, 0.5  # as `distributed` assumes
BUCKET_BYTES = 25 * 2**20  # DDP's default
STATE_BYTES, WIRE_BYTES = 16, 4  # per parameter: kept, and sent (float32)


@dataclass(frozen=True)
class Cluster:
    """Cluster of hosts with up to eight GPUs each."""

    gpus: int

    @property
    def on_host(self) -> int:
        return min(ON_HOST, self.gpus)

    @property
    def hosts(self) -> int:
        return self.gpus // self.on_host

    @property
    def beta(self) -> float:
        """Return seconds per byte in a collective. A host's network cards share its traffic."""
        return NVLINK_BETA if self.hosts == 1 else max(NVLINK_BETA, FABRIC_BETA / self.on_host)

    def ring(self, size: float) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `size` bytes."""
        far = self.hosts if self.hosts > 1 else 0
        return (self.gpus - 1 - far) * NVLINK_S + far * FABRIC_S + size * self.beta

    def tree(self, size: float) -> float:
        """Return the seconds of one half of an all-reduce by a tree over hosts."""
        hops = ceil(log2(self.hosts))
        return (self.on_host - 1) * NVLINK_S + hops * FABRIC_S + size * self.beta

    def all_reduce(self, size: float) -> float:
        return 2 * min(self.ring(size), self.tree(size))


def ddp_s(cluster: Cluster, parameters: float, layers: int, compute_s: float) -> float:
    """Return the seconds of communication that backward can't hide: at least the last bucket's."""
    size = parameters * WIRE_BYTES
    buckets = ceil(size / BUCKET_BYTES)
    each = cluster.all_reduce(size / buckets)
    return max(each, buckets * each - compute_s * 2 / 3)


def sharded_s(
    parts: Cluster, hosts: int, parameters: float, layers: int, compute_s: float
) -> float:
    """Return exposed seconds of two all-gathers and a reduce-scatter for each layer, over `parts`.

    With `hosts` above 1, each part is also all-reduced over that many copies.
    """
    size = parameters * WIRE_BYTES / layers
    gather = parts.ring(size)
    across = 2 * (ceil(log2(hosts)) * FABRIC_S + size / parts.gpus * FABRIC_BETA) * (hosts > 1)
    forward = max(gather, layers * gather - compute_s / 3)
    last = gather + across
    return forward + max(last, layers * (gather + last) - compute_s * 2 / 3)


def efficiency(strategy: str, gpus: int, parameters: float, layers: int, tokens: int) -> str:
    """Return the efficiency, or a dash if the state does not fit or hybrid has only one host."""
    cluster = Cluster(gpus)
    compute_s = 6 * parameters * tokens / FLOPS
    parts = {"ddp": 1, "fsdp2": gpus, "hybrid": cluster.on_host}[strategy]
    fits = parameters * STATE_BYTES / parts <= MEMORY_BYTES * SHARE
    if not fits or (strategy == "hybrid" and cluster.hosts == 1):
        return "–"
    if strategy == "ddp":
        exposed_s = ddp_s(cluster, parameters, layers, compute_s)
    else:
        hosts = cluster.hosts if strategy == "hybrid" else 1
        exposed_s = sharded_s(Cluster(parts), hosts, parameters, layers, compute_s)
    return f"{100 * compute_s / (compute_s + exposed_s):.0f} %"


# The cost of an all-reduce.

SIZES = [2**power for power in range(10, 27, 2)]
SECONDS_A_SIZE = 1.0
REPEATS = (5, 200)


def measured() -> dict[int, float]:
    """Run as a rank; return the slowest rank's median seconds of an all-reduce, by its bytes.

    A barrier before each all-reduce keeps the wait for other ranks out of the time.
    """
    device = torch.device(DEVICE)
    found = {}
    for size in SIZES:
        tensor, times = torch.zeros(size // 4, device=device), []
        begun_s, repeats = time.perf_counter(), REPEATS[1]
        while len(times) < repeats:
            dist.barrier()
            times.append(timed(lambda tensor=tensor: dist.all_reduce(tensor))[0])
            if len(times) == REPEATS[0]:  # the ranks must agree
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


@contextmanager
def process_group() -> Iterator[None]:
    """Join torchrun's process group during the block, each rank on its own GPU, if any."""
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    yield
    dist.barrier()
    time.sleep(1)  # gloo's threads release their last tensors before Python ends
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        with process_group():
            times = measured()
            if dist.get_rank() == 0:
                print(json.dumps(times))
        return
    parser = plain_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 2048])
    parser.add_argument("--links", type=int, nargs="+", help="numbers of processes")
    options = parser.parse_args()
    for processes in options.links or ():
        report(processes)
    if not options.links:
        print(predicted(options.tokens))


def predicted(every: list[int]) -> str:
    counts = (8, 64, 256, 1024)
    rows = [
        (model, f"{tokens:,}", strategy,
         *(efficiency(strategy, gpus, parameters, layers, tokens) for gpus in counts))
        for tokens in every
        for model, parameters, layers in (("1 B", 1e9, 24), ("7 B", 7e9, 32))
        for strategy in ("ddp", "fsdp2", "hybrid")
    ]  # fmt: skip
    return markdown(("model", "tokens a GPU", "strategy", *counts), *rows)


if __name__ == "__main__":
    main()
