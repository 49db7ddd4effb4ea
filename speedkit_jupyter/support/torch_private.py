"""torch's private names: what it does not promise, in one place.

Tested on torch 2.9, 2.11 and 2.13 (`make versions`): `tests/support/test_torch_private.py` calls
every function, and allows no private name elsewhere. All these versions have all of the names,
unless a function says otherwise. Where torch has moved one, `moved` tells which: the entry of the
catalog that needs it is declined, and anything else raises the AttributeError or ImportError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

# The packages of torch.compile, which write caches of their own.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
# The module of `dynamo_config`, for whoever must not load it.
DYNAMO_CONFIG = f"{COMPILERS[0]}.config"


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

    product = torch.ops.mkldnn._linear_pointwise
    return product.default  # type: ignore[no-any-return]


def onednn_is_allowed() -> Callable[[], bool]:
    """Return what tells whether `torch.backends.mkldnn.flags` allows oneDNN, asked at each product.

    The public attribute, where there is one, takes ten times as long.
    """
    import torch

    return torch._C._get_mkldnn_enabled


def allow_onednn(value: bool) -> None:
    """Allow it or not. The public `flags()` writes precisions, too."""
    import torch

    torch._C._set_mkldnn_enabled(value)


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


# Memory.


def has_allocator_settings() -> bool:
    """Return whether the allocator's settings can be asked for and set: since 2.10."""
    import torch

    return hasattr(torch._C, "_accelerator_getAllocatorSettings")


def allocator_settings() -> str:
    """Return the settings of CUDA's allocator. Since 2.10; raises AttributeError before."""
    import torch

    return torch._C._accelerator_getAllocatorSettings()


def set_allocator_settings(settings: str) -> None:
    """Set them from the next segment on."""
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors refer to its memory, some of torch's own with them; 0 without the
    name.
    """
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


# Other switches.


def cublas(name: str) -> Callable[[], Any]:
    """Return what reads this setting of cuBLAS; the public getters hide the second half of some."""
    import torch

    return getattr(torch._C, f"_get_cublas_{name}")  # type: ignore[no-any-return]


def default_device() -> Any:
    """Return the default device; None, as no public name does, where torch wraps no functions."""
    import torch

    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


def attention_order() -> list[int]:
    """Return the order in which attention kernels are tried, as numbers of SDPBackend."""
    import torch

    return torch._C._get_sdp_priority_order()


def set_attention_order(order: Sequence[int]) -> None:
    """Set it; the public `sdpa_kernel` does so for a block only."""
    import torch

    torch._C._set_sdp_priority_order(list(order))


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two int8 matrices in int32, as torchao's layers call it."""
    import torch

    return torch._int_mm(a, b)


# Containers. `torch.utils._pytree` has no public name; every version since 2.0 has these.


def tree_leaves(value: Any) -> list[Any]:
    """Return what lies in containers, one in another, as torch's own transformations see them."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def tree_map(function: Callable[..., Any], value: Any, *more: Any) -> Any:
    """Return the same containers with the function's result in place of each leaf, or of those at
    the same place in all.
    """
    from torch.utils import _pytree

    return _pytree.tree_map(function, value, *more)


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves, and what `tree_unflatten` makes the containers of again."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(value)


def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Return containers of that structure with these leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


# Tensors, modes and autograd.


def dispatch_mode() -> type[TorchDispatchMode]:
    """Return the base class of modes that see every operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Have no mode see the operations of the block."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Return whether its values are those of tensors in its attributes."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def innermost_function_mode() -> Any:
    """Return the mode that sees torch's functions first; None without."""
    import torch

    return torch.overrides._get_current_function_mode()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether it belongs into `vmap`, `grad` or another of `torch.func`'s transforms."""
    from torch._C import _functorch

    return _functorch.is_functorch_wrapped_tensor(tensor)


def is_transforming() -> bool:
    """Return whether one of these transforms is at work."""
    from torch._C import _functorch

    return _functorch.peek_interpreter_stack() is not None


def is_profiled() -> bool:
    """Return whether a profiler of torch's is at work."""
    from torch._C import _autograd

    return _autograd._profiler_enabled()


def sequence_number() -> int:
    """Return the number that the next node of the autograd graph gets."""
    from torch._C import _autograd

    return _autograd._get_sequence_nr()


def current_node() -> Any:
    """Return the node whose backward pass is computed in this thread; None outside of one."""
    import torch

    return torch._C._current_autograd_node()


def can_hook_saved_tensors() -> bool:
    """Return whether torch allows hooks on what is kept for a backward pass here."""
    from torch._C import _autograd

    return _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined,no-any-return]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set how often tensors count as written: an earlier graph compares this with the value then.

    Only for tensors that hold their values of then again.
    """
    from torch._C import _autograd

    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def loader_iterator() -> type:
    """Return the class of a DataLoader's iterators."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has some; its destructor does so later."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


# torch.compile.


def dynamo_config() -> Any:
    """Return Dynamo's settings. `torch.compiler.config` has some of them only."""
    from torch._dynamo import config

    return config


def lookups() -> list[Any]:
    """Return the caches by which torch finds the functions that modes see, as far as loaded."""
    modules = map(sys.modules.get, ("torch.overrides", f"{COMPILERS[0]}.trace_rules"))
    values = [value for module in modules if module for value in vars(module).values()]
    return [one for one in values if hasattr(one, "cache_clear") and hasattr(one, "cache_info")]


def compile_counters() -> dict[str, Any]:
    """Return Dynamo's counts of this process."""
    from torch._dynamo import utils

    return utils.counters


def compilations() -> Sequence[Any]:
    """Return what Dynamo noted of its latest compilations; none while it is not loaded."""
    utils: Any = sys.modules.get(f"{COMPILERS[0]}.utils")
    return () if utils is None else utils.get_compilation_metrics()


def on_compiling(start: Callable[[Any], None], end: Callable[[Any], None]) -> Callable[[], None]:
    """Call these around each compilation; returns what ends that."""
    from torch._dynamo import callback

    handler = callback.callback_handler
    handler.register_start_callback(start)
    handler.register_end_callback(end)

    def remove() -> None:
        handler.remove_start_callback(start)
        handler.remove_end_callback(end)

    return remove


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile raised it."""
    return any(base.__module__.startswith(COMPILERS) for base in type(error).__mro__)


def forget_builds() -> None:
    """Have Inductor look anew for libraries and instructions that it remembers as failed."""
    from torch._inductor import codecache, cpu_vec_isa

    codecache.CppCodeCache.cache_clear()
    codecache.CppPythonBindingsCodeCache.cache_clear()
    # A killed probe of the vector instructions is remembered as "there are none".
    for holder in (cpu_vec_isa, cpu_vec_isa.VecISA):
        for remembered in list(vars(holder).values()):
            if hasattr(remembered, "cache_clear"):
                remembered.cache_clear()
