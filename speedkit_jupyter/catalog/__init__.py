"""Define CATALOG, the optimizations in the order in which a plan decides and applies them."""

from __future__ import annotations

from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.channels_last import ChannelsLast
from speedkit_jupyter.catalog.compile import Compile
from speedkit_jupyter.catalog.cuda_graphs import CudaGraphs
from speedkit_jupyter.catalog.cudnn_benchmark import CudnnBenchmark
from speedkit_jupyter.catalog.device import Device
from speedkit_jupyter.catalog.fused_optimizer import FusedOptimizer
from speedkit_jupyter.catalog.gemm import Gemm
from speedkit_jupyter.catalog.grad_scaler import GradScaler
from speedkit_jupyter.catalog.inference import Inference
from speedkit_jupyter.catalog.malloc import Malloc
from speedkit_jupyter.catalog.precision import Precision
from speedkit_jupyter.catalog.sdpa import Sdpa
from speedkit_jupyter.catalog.tf32 import Tf32
from speedkit_jupyter.catalog.threads import Threads
from speedkit_jupyter.machines import flags
from speedkit_jupyter.support.extras import provided

CATALOG: list[Optimization] = [
    Device(),
    Threads(),
    Precision(),
    GradScaler(),
    Tf32(),
    Gemm(),
    Sdpa(),
    ChannelsLast(),
    CudnnBenchmark(),
    FusedOptimizer(),
    Malloc(),
    CudaGraphs(),
    Compile(),
    Inference(),
]


def add(entry: Optimization) -> None:
    """Insert `entry` into CATALOG before the entry named `entry.before`, or else at the end."""
    names = [one.name for one in CATALOG]
    CATALOG.insert(names.index(entry.before) if entry.before in names else len(names), entry)


def find(name: str) -> Optimization | None:
    """Return the CATALOG entry with this name or alias; None if the name is unknown."""
    return next((entry for entry in CATALOG if name == entry.name or name in entry.aliases), None)


def named(name: str) -> Optimization:
    """Return the CATALOG entry with this name or alias. Raises KeyError for an unknown name."""
    optimization = find(name)
    if optimization is None:
        raise KeyError(name)
    return optimization


for switches in provided("SWITCHES"):
    for switch in switches:
        add(switch)
flags.OWNERS[:] = [entry.process_flags for entry in CATALOG]
