"""Liger, as far as it is called here: where its kernels run, and what may be given to them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

LIBRARY = "liger-kernel"
# The first whose kernels were compared with the modules; Triton's own limit.
SINCE, CAPABILITY = (0, 8), (7, 0)
# Liger's own: rows that are longer have no kernel.
LONGEST = 65536
# Beside the devices that Triton writes for: `cpu` in its interpreter, which tests use.
INTERPRETED: set[str] = set()


def obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why its kernels can't run here; empty where they can."""
    kind, gpu = devices.kind_of(facts.device), hardware.accelerator(facts.device)
    if facts.device_type not in INTERPRETED:
        if kind is None or not kind.has_triton:
            return (
                "its kernels are written in Triton, for GPUs by CUDA, ROCm and XPU; "
                f"this is {facts.device}"
            )
        if not hardware.triton:
            triton = "triton-windows" if hardware.system == "Windows" else "triton"
            return f"no working Triton on {hardware.system}: pip install {triton}"
    if gpu is not None and gpu.is_nvidia and gpu.capability and gpu.capability < CAPABILITY:
        major, minor = gpu.capability
        return f"Triton needs compute capability 7.0; {gpu.name} has {major}.{minor}"
    installed = hardware.libraries.get(LIBRARY)
    if installed is None:
        return f"needs {LIBRARY}: pip install {LIBRARY}"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < SINCE:
        since = ".".join(map(str, SINCE))
        return f"needs {LIBRARY} {since}; this is {installed}: pip install -U {LIBRARY}"
    return ""


def internals() -> tuple[Any, ...]:
    """What this stands on and torch does not promise. Raises AttributeError where torch has moved
    one of them.
    """
    import torch
    from torch.autograd import forward_ad
    from torch.nn.modules import module

    return (
        torch._C._get_tracing_state,
        torch._C._functorch.is_functorch_wrapped_tensor,
        forward_ad._current_level,
        module._has_any_global_hook,
    )


def imported() -> Any:
    """Its functions, by their public names. Raises SpeedKitError where it can't be imported."""
    try:
        from liger_kernel.transformers import functional
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SpeedKitError(
            f"{LIBRARY} can't be imported: {type(error).__name__}: {first}"
        ) from None
    return functional


def takes(*tensors: Any) -> bool:
    """Whether a kernel may read these: plain floating-point numbers in the memory of one GPU,
    which nothing traces, batches or differentiates forwards.
    """
    import torch
    from torch.autograd import forward_ad

    if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in dtypes
        and tensor.layout is torch.strided
        and tensor.device == tensors[0].device
        and _is_known(tensor.device.type)
        and 0 < tensor.shape[-1] <= LONGEST
        and tensor.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def _is_known(device_type: str) -> bool:
    kind = devices.kind_of(device_type)
    return device_type in INTERPRETED or (kind is not None and kind.has_triton)


# What gives a view of a tensor, and what makes a new one and keeps nothing of it for later.
VIEWS = {f"{kind}Backward0" for kind in ("View", "UnsafeView", "ReshapeAlias", "Transpose")}
MAKES = {f"{kind}Backward0" for kind in ("Addmm", "Mm", "Add", "Mul", "ToCopy", "Linear")} | {
    "LigerRMSNormFunctionBackward"
}


def is_nobodys(tensor: torch.Tensor) -> bool:
    """Whether a kernel may write over it: what made it does not need it in its own backward pass.

    torch would not notice: what Triton writes raises no tensor's version.
    """
    node: Any = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return (node is None and not tensor.requires_grad) or (
        node is not None and node.name() in MAKES
    )


def are_nobodys(tensor: Any, other: Any) -> bool:
    """Whether a kernel may write over both."""
    apart = tensor.data_ptr() != other.data_ptr()
    return apart and is_nobodys(tensor) and is_nobodys(other)


class Once:
    """Before a kernel's backward pass: torch would not notice that it can't be had twice."""

    def __init__(self, kind: str, writes: bool) -> None:
        self._kind, self._writes, self._ran = kind, writes, False

    def __call__(self, gradients: Any) -> None:
        """Raises SpeedKitError for gradients of gradients, and for a second pass where the first
        wrote over what it read.
        """
        import torch

        without = f"apply without it: fused_kernels: {{enabled: true, {self._kind}: false}}"
        if torch.is_grad_enabled():
            raise SpeedKitError(f"Liger's {self._kind} has no second derivative; {without}")
        if self._ran and self._writes:
            raise SpeedKitError(
                f"Liger's {self._kind} writes its gradients over what they were made of, so there "
                f"is no second backward pass through the same graph; {without}"
            )
        self._ran = True


def once(kind: str, result: torch.Tensor, writes: bool) -> torch.Tensor:
    """The result, whose backward pass is watched so."""
    if result.grad_fn is not None:
        result.grad_fn.register_prehook(Once(kind, writes))
    return result


def promoted(*tensors: Any) -> torch.dtype:
    """What a product of these is of: under autocast weights and angles are float32."""
    import torch

    return torch.promote_types(*(tensor.dtype for tensor in tensors))
