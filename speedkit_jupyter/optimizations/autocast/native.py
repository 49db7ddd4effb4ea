"""The precision that an accelerator is built for."""

from __future__ import annotations

from speedkit_jupyter.machines.hardware import Accelerator


def has_fp16(gpu: Accelerator) -> bool:
    """Whether it multiplies fp16 natively."""
    return gpu.tensor_cores or gpu.rocm is not None or gpu.kind != "cuda"


def native_precision(gpu: Accelerator) -> tuple[str, str, bool]:
    """The precision that this accelerator is built for, why, and whether it always pays."""
    capability = ".".join(map(str, gpu.capability or ()))
    if gpu.kind == "mps":
        return _native_on_mps(gpu)
    if gpu.kind != "cuda" or gpu.rocm:
        if gpu.bf16:
            return "bf16", f"{gpu.name} has bf16 matrix units; whether they pay differs", False
        return "fp32", f"{gpu.name} reports no bf16 matrix units", True
    if gpu.bf16:
        return "bf16", f"compute capability {capability} >= 8.0: bf16 Tensor Cores", True
    if gpu.tensor_cores:
        return (
            "fp16",
            f"compute capability {capability}: fp16 Tensor Cores, no bf16 (it would be emulated)",
            True,
        )
    return "fp32", f"{gpu.name} (compute capability {capability}) has no Tensor Cores", True


def _native_on_mps(gpu: Accelerator) -> tuple[str, str, bool]:
    if not gpu.bf16:
        return "fp32", "bf16 on MPS needs macOS 14 or later", True
    if "M1" in gpu.name.split():
        return "fp32", f"{gpu.name} emulates bf16; fp16 is there on request", True
    return "bf16", f"{gpu.name} runs bf16 on macOS 14 and later; whether it pays differs", False
