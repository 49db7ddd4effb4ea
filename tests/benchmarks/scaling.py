"""The predicted efficiency of ddp, fsdp2 and hybrid on up to 1,024 GPUs: docs/scaling.md's table.

`python tests/benchmarks/scaling.py [--tokens 8192]` computes it from the figures below; it measures
nothing. Efficiency is a step's computing divided by computing and exposed communication.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import ceil, log2

# Assumed, per GPU and direction: the rates that collectives reach of 450 GB/s (NVLink 4) and of
# 400 Gbit/s (one InfiniBand NDR card for each GPU), and the time of a hop.
NVLINK_S, NVLINK_BETA = 3e-6, 1 / 300e9
FABRIC_S, FABRIC_BETA = 10e-6, 1 / 40e9
ON_HOST = 8
FLOPS = 400e12  # reached, of 989e12 for bf16 on an H100
MEMORY_BYTES, SHARE = 80e9, 0.5  # as `distributed` decides
BUCKET_BYTES = 25 * 2**20  # DDP's own
STATE_BYTES, WIRE_BYTES = 16, 4  # of a parameter: kept, and sent (float32)


@dataclass(frozen=True)
class Cluster:
    """`hosts` of up to eight GPUs each."""

    gpus: int

    @property
    def on_host(self) -> int:
        return min(ON_HOST, self.gpus)

    @property
    def hosts(self) -> int:
        return self.gpus // self.on_host

    @property
    def beta(self) -> float:
        """Return seconds per byte through all GPUs; a host's cards share its outgoing bytes."""
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
    """Return exposed seconds: communication after the backward pass, at least the last bucket."""
    size = parameters * WIRE_BYTES
    buckets = ceil(size / BUCKET_BYTES)
    each = cluster.all_reduce(size / buckets)
    return max(each, buckets * each - compute_s * 2 / 3)


def sharded_s(
    parts: Cluster, hosts: int, parameters: float, layers: int, compute_s: float
) -> float:
    """Return exposed seconds of two gathers and a reduce-scatter a block, over `parts`.

    With `hosts` above 1 each part is all-reduced over as many copies, too.
    """
    size = parameters * WIRE_BYTES / layers
    gather = parts.ring(size)
    across = 2 * (ceil(log2(hosts)) * FABRIC_S + size / parts.gpus * FABRIC_BETA) * (hosts > 1)
    forward = max(gather, layers * gather - compute_s / 3)
    last = gather + across
    return forward + max(last, layers * (gather + last) - compute_s * 2 / 3)


def efficiency(strategy: str, gpus: int, parameters: float, layers: int, tokens: int) -> str:
    """Return it in percent; a dash where the training state does not fit, or it makes no sense."""
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 2048])
    counts = (8, 64, 256, 1024)
    print(f"| model | tokens a GPU | strategy | {' | '.join(map(str, counts))} |")
    print("| --- " * 3 + "| ---: " * len(counts) + "|")
    for tokens in parser.parse_args().tokens:
        for name, parameters, layers in (("1 B", 1e9, 24), ("7 B", 7e9, 32)):
            for strategy in ("ddp", "fsdp2", "hybrid"):
                found = [efficiency(strategy, one, parameters, layers, tokens) for one in counts]
                print(f"| {name} | {tokens:,} | {strategy} | {' | '.join(found)} |")


if __name__ == "__main__":
    main()
