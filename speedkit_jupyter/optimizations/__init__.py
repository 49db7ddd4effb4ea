"""The optimizations. CATALOG's order is the order of deciding and applying; a user may add some."""

from __future__ import annotations

from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations.activation_checkpointing import ActivationCheckpointing
from speedkit_jupyter.optimizations.allocator import Allocator
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.channels_last import ChannelsLast
from speedkit_jupyter.optimizations.compile import Compile
from speedkit_jupyter.optimizations.cuda_graphs import CudaGraphs
from speedkit_jupyter.optimizations.cudnn_benchmark import CudnnBenchmark
from speedkit_jupyter.optimizations.device import Device
from speedkit_jupyter.optimizations.distributed import Distributed
from speedkit_jupyter.optimizations.float8 import Float8
from speedkit_jupyter.optimizations.fused_kernels import FusedKernels
from speedkit_jupyter.optimizations.fused_optimizer import FusedOptimizer
from speedkit_jupyter.optimizations.gemm import Gemm
from speedkit_jupyter.optimizations.grad_scaler import GradScaler
from speedkit_jupyter.optimizations.inference import Inference
from speedkit_jupyter.optimizations.int4 import Int4
from speedkit_jupyter.optimizations.int8 import Int8
from speedkit_jupyter.optimizations.malloc import Malloc
from speedkit_jupyter.optimizations.mx import Mx
from speedkit_jupyter.optimizations.precision import Precision
from speedkit_jupyter.optimizations.reduced_reduction import ReducedReduction
from speedkit_jupyter.optimizations.sdpa import Sdpa
from speedkit_jupyter.optimizations.sparsity import Sparsity
from speedkit_jupyter.optimizations.tf32 import Tf32
from speedkit_jupyter.optimizations.threads import Threads

CATALOG: list[Optimization] = [
    Device(),
    Threads(),
    Allocator(),
    Precision(),
    GradScaler(),
    Tf32(),
    ReducedReduction(),
    Gemm(),
    Sdpa(),
    ChannelsLast(),
    CudnnBenchmark(),
    FusedOptimizer(),
    Malloc(),
    FusedKernels(),
    ActivationCheckpointing(),
    Int8(),
    Int4(),
    Float8(),
    Mx(),
    Sparsity(),
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
