"""torch's private names: what it does not promise, in one place.

Each function says since when torch has the name and what happens without it. Tested on torch 2.9,
2.11 and 2.13 (`make versions`); `tests/support/test_torch_private.py` calls every one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def moved(error: BaseException) -> str:
    """Return what torch does not have (any more), if that is what the error says; else empty."""
    name = str(getattr(error, "name", None) or "")
    if isinstance(error, ImportError):
        asked = getattr(error, "name_from", None)
        return ".".join(filter(None, (name, asked))) if _is_torchs(name) else ""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    owner = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
    module = getattr(owner, "__module__", None) or owner.__name__
    return f"{owner.__name__}.{name}" if _is_torchs(module) else ""


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


# Precision of float32 products.


def fp32_precision(backend: str, operation: str) -> str:
    """Return what is in force, of one that follows its parent the parent's value. Since 2.9."""
    import torch

    return torch._C._get_fp32_precision_getter(backend, operation)


def set_fp32_precision(backend: str, operation: str, value: str) -> None:
    """Set it; `none` follows the parent. torch's own attributes have no way to write `none`."""
    import torch

    torch._C._set_fp32_precision_setter(backend, operation, value)


def allows_tf32(library: str) -> bool:
    """Return the old setting of `cublas`, `cudnn` or `onednn`.

    Raises RuntimeError where the new ones disagree. The public `allow_tf32` of oneDNN is missing,
    and that of cuBLAS warns.
    """
    import torch

    return bool(getattr(torch._C, f"_get_{library}_allow_tf32")())


def allow_tf32(library: str, value: bool) -> None:
    """Set the old setting of `cudnn` or `onednn`."""
    import torch

    getattr(torch._C, f"_set_{library}_allow_tf32")(value)


def flags_can_be_set() -> AbstractContextManager[None]:
    """Let flags of backends be set, also where torch's own tests were imported, which forbid it.

    A torch without the name forbids nothing.
    """
    import torch

    allowed: Any = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    return allowed()  # type: ignore[no-any-return]


# oneDNN's product, and kernels of ours on the dispatcher.


def linear_by_onednn() -> Callable[..., torch.Tensor]:
    """Return oneDNN's float32 product of two matrices. Raises AttributeError in a build without
    oneDNN; the entry `gemm` is declined then.
    """
    import torch

    return torch.ops.mkldnn._linear_pointwise.default  # type: ignore[no-any-return]


def onednn_is_allowed() -> Callable[[], bool]:
    """Return what tells whether `torch.backends.mkldnn.flags` allows oneDNN, asked at each product.

    The public attribute, where there is one, takes ten times as long.
    """
    import torch

    return torch._C._get_mkldnn_enabled


def kernels_of_others() -> set[str]:
    """Return the kernels that users have put on the dispatcher, as `aten/mm/CPU`."""
    import torch

    return {str(name) for name in torch.library._impls}


def remove_kernels(library: torch.library.Library) -> None:
    """Take a library's kernels off the dispatcher; it would do so when it is collected."""
    library._destroy()


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile run this function, and what it calls, as it is, at no cost for a call.

    `torch.compiler.disable` wraps it, which takes a microsecond a call.
    """
    import torch

    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]


# The machine.


def cpu_features() -> list[str]:
    """Return bf16's instructions on this CPU, for torch before 2.11, whose
    `torch.cpu.get_capabilities` is missing. Later ones have no such names, and need none.
    """
    import torch

    asked = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    return [name for name, probe in asked.items() if getattr(torch.cpu, probe, bool)()]


def allocator_settings() -> str:
    """Return the settings of CUDA's allocator. Since 2.10; raises AttributeError before."""
    import torch

    return torch._C._accelerator_getAllocatorSettings()


def set_allocator_settings(settings: str) -> None:
    """Set them from the next segment on."""
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)


# Tensors.


def without_modes() -> AbstractContextManager[None]:
    """Have no `__torch_function__` mode see what the block asks of tensors."""
    import torch

    return torch._C.DisableTorchFunction()


def leaves(value: Any) -> list[Any]:
    """Return what lies in containers, one in another, as torch's own transformations see them.

    `torch.utils._pytree` has no public name yet; every version since 2.0 has this function.
    """
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version
