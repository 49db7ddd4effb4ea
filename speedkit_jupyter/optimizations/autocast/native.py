"""The precision that an accelerator is built for."""

from __future__ import annotations

from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Accelerator


def has_fp16(gpu: Accelerator) -> bool:
    """Whether it multiplies fp16 natively."""
    return gpu.tensor_cores or not gpu.is_nvidia


def native_precision(gpu: Accelerator) -> tuple[str, str, bool]:
    """The precision that this accelerator is built for, why, and whether it always pays."""
    capability = ".".join(map(str, gpu.capability or ()))
    if not gpu.is_nvidia:
        return _by_kind(gpu)
    if gpu.bf16:
        return "bf16", f"compute capability {capability} >= 8.0: bf16 Tensor Cores", True
    if gpu.tensor_cores:
        return (
            "fp16",
            f"compute capability {capability}: fp16 Tensor Cores, no bf16 (it would be emulated)",
            True,
        )
    return "fp32", f"{gpu.name} (compute capability {capability}) has no Tensor Cores", True


def _by_kind(gpu: Accelerator) -> tuple[str, str, bool]:
    kind = devices.KINDS[gpu.kind]
    if not gpu.bf16:
        return "fp32", f"{gpu.name} {kind.no_bf16}", True
    if set(kind.emulating) & set(gpu.name.split()):
        return "fp32", f"{gpu.name} emulates bf16; fp16 is there on request", True
    return "bf16", f"{gpu.name} {kind.bf16}", False
