"""The optimizations. CATALOG's order is the order of deciding and applying; a user may add some."""

from __future__ import annotations

from speedkit_jupyter.catalog.activation_checkpointing import ActivationCheckpointing
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.channels_last import ChannelsLast
from speedkit_jupyter.catalog.compile import Compile
from speedkit_jupyter.catalog.cuda_graphs import CudaGraphs
from speedkit_jupyter.catalog.cudnn_benchmark import CudnnBenchmark
from speedkit_jupyter.catalog.device import Device
from speedkit_jupyter.catalog.distributed import Distributed
from speedkit_jupyter.catalog.float8 import Float8
from speedkit_jupyter.catalog.fused_optimizer import FusedOptimizer
from speedkit_jupyter.catalog.gemm import Gemm
from speedkit_jupyter.catalog.grad_scaler import GradScaler
from speedkit_jupyter.catalog.inference import Inference
from speedkit_jupyter.catalog.int4 import Int4
from speedkit_jupyter.catalog.int8 import Int8
from speedkit_jupyter.catalog.malloc import Malloc
from speedkit_jupyter.catalog.precision import Precision
from speedkit_jupyter.catalog.sdpa import Sdpa
from speedkit_jupyter.catalog.tf32 import Tf32
from speedkit_jupyter.catalog.threads import Threads
from speedkit_jupyter.machines import flags

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
    ActivationCheckpointing(),
    Int8(),
    Int4(),
    Float8(),
    CudaGraphs(),
    Compile(),
    Distributed(),
    Inference(),
]
flags.OWNERS[:] = [entry.switches for entry in CATALOG]


def find(name: str) -> Optimization | None:
    """Return the entry of that name, or of that other spelling; None without one."""
    return next((entry for entry in CATALOG if name == entry.name or name in entry.aliases), None)


def named(name: str) -> Optimization:
    """Return the entry of that name. Raises KeyError."""
    optimization = find(name)
    if optimization is None:
        raise KeyError(name)
    return optimization
