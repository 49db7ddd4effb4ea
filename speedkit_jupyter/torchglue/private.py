"""Define torch's private names for tensors, operators, modes and autograd.

`dynamo.py`, `inductor.py` and `modules.py` have the other private names. A test refuses them in
other files. Each name exists in torch 2.9, 2.11 and 2.13, and a test calls it (`make versions`). If
torch moves a name, its use raises AttributeError or ImportError. Then `missing_name` returns the
name, and the optimization is declined, unless a comment says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def missing_name(error: BaseException) -> str:
    """Return the private name that torch lacks according to an error; empty for other errors."""
    name = str(getattr(error, "name", None) or "")
    if isinstance(error, ImportError):
        asked = getattr(error, "name_from", None)
        return ".".join(filter(None, (name, asked))) if f"{name}.".startswith("torch.") else ""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    owner = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
    module = getattr(owner, "__module__", None) or owner.__name__
    return f"{owner.__name__}.{name}" if f"{module}.".startswith("torch.") else ""


def found(home: str, name: str) -> Any:
    """Return the attribute `name` of the module `home`; import the module if needed."""
    return getattr(sys.modules.get(home) or import_module(home), name)


def _function(home: str, name: str) -> Callable[..., Any]:
    """Return a function that looks up torch's function at each call, and calls it."""
    return lambda *args, **kwargs: found(home, name)(*args, **kwargs)


def cached_functions(owner: Any) -> list[Any]:
    """Return the functions of a module or class that cache their results."""
    return [one for one in vars(owner).values() if hasattr(one, "cache_clear")]


_CORE, _AUTOGRAD, _FUNCTORCH = "torch._C", "torch._C._autograd", "torch._C._functorch"
_PYTREE, _DISPATCH = "torch.utils._pytree", "torch.utils._python_dispatch"

# Return and set the priority order of attention kernels, as values of SDPBackend. The public
# `sdpa_kernel` sets the order only within a block.
attention_order = _function(_CORE, "_get_sdp_priority_order")
set_attention_order = _function(_CORE, "_set_sdp_priority_order")

# --- tensors ---


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage, including some of torch's own."""
    return int(found(_CORE, "_storage_Use_Count")(tensor.untyped_storage()._cdata))


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters of tensors whose earlier values were restored."""
    found(_AUTOGRAD, "_unsafe_set_version_counter")(tuple(tensors), tuple(versions))


def version(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


# Returns a number that is unique among living storages.
address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def untyped(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype | None]:
    """Return a storage as untyped, and its dtype; an untyped storage has the dtype None."""
    own = getattr(storage, "_untyped_storage", None)
    return (storage, None) if own is None else (own, storage.dtype)


def typed(storage: torch.UntypedStorage, dtype: torch.dtype | None) -> Any:
    """Return a typed storage, or an untyped one if `dtype` is None: the inverse of `untyped`."""
    import torch

    more: dict[str, Any] = {"dtype": dtype, "_internal": True}  # `_internal` avoids a warning
    return storage if dtype is None else torch.TypedStorage(wrap_storage=storage, **more)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def batches_given(batches: Any) -> int:
    """Return the number of batches that a DataLoader iterator has yielded; 0 for other objects."""
    return getattr(batches, "_num_yielded", 0)


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and the values of a sparse COO tensor, coalesced or not."""
    return [tensor._indices(), tensor._values()]


# Attributes with a tensor's hooks (None: no hooks). If torch renames them, a step's hooks are not
# removed, and MicroBatch does not refuse hooks that would run once for each micro-batch.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Return whether a leaf tensor has hooks that run after its gradient is accumulated."""
    return bool(getattr(leaf, TENSOR_HOOKS[1], None))


# Return, in this order, whether a tensor wraps inner tensors, and whether `torch.func` wraps it.
is_made_of_tensors = _function(_DISPATCH, "is_traceable_wrapper_subclass")
is_transformed = _function(_FUNCTORCH, "is_functorch_wrapped_tensor")


def is_transforming() -> bool:
    """Return whether `vmap`, `grad` or another transform of `torch.func` is active."""
    return found(_FUNCTORCH, "peek_interpreter_stack")() is not None


# torch's functions for nested containers.
tree_leaves = _function(_PYTREE, "tree_leaves")
tree_map = _function(_PYTREE, "tree_map")
tree_flatten = _function(_PYTREE, "tree_flatten")
tree_unflatten = _function(_PYTREE, "tree_unflatten")
# An import line for generated code; `tree_map_only` maps a structure's values of given types.
TREE_MAP_IMPORT = f"from {_PYTREE} import tree_map_only"

# --- operators ---

# Returns the int32 product of two int8 matrices, as torchao's layers compute it.
int8_product = _function("torch", "_int_mm")
# oneDNN's float32 linear layer, as an expression for generated code.
ONEDNN_LINEAR = "torch.ops.mkldnn._linear_pointwise"


def linear_by_onednn() -> Callable[..., torch.Tensor]:
    """Return oneDNN's float32 linear operator. Raises AttributeError in a build without oneDNN."""
    import torch

    return torch.ops.mkldnn._linear_pointwise.default  # type: ignore[no-any-return]


# An operator's schema: its `name` (`aten::addmm`), `arguments`, and `is_mutable`.
operator_schema: Callable[[Any], Any] = attrgetter("_schema")
# Names or prefixes of operators; each comment says what happens if torch renames the operator.
SOFTMAX = "aten::_softmax"  # advice on hand-written attention misses part of the time
MULTIPLY_ALL = "_foreach_mul_"  # advice on parameter averages names a missing function
GRAD_SCALER = "_amp_"  # a GradScaler's kernels get float64, which they refuse
CAST = "_to_copy"  # copies count as arithmetic
READ_A_NUMBER = "_local_scalar_dense"  # the graph break of `.item()` keeps torch's wording

# --- modes and autograd ---

# Return, in this order: a context manager without dispatch modes; the innermost function mode.
without_dispatch_modes = _function(_DISPATCH, "_disable_current_modes")
innermost_function_mode = _function("torch.overrides", "_get_current_function_mode")
# Returns the base class of modes that see every operator.
dispatch_mode = partial(found, _DISPATCH, "TorchDispatchMode")
# Return, in this order: whether a profiler is active; the current node of this thread's backward
# pass (None outside); whether saved-tensor hooks are allowed.
is_profiled = _function(_AUTOGRAD, "_profiler_enabled")
current_node = _function(_CORE, "_current_autograd_node")
can_hook_saved_tensors = _function(_AUTOGRAD, "_saved_tensors_hooks_is_enabled")


def autocast_dtype(block: torch.autocast) -> torch.dtype | None:
    """Return the dtype of an autocast context; None if it is disabled."""
    return block.fast_dtype if block._enabled else None


def after_backward(callback: Callable[[], None]) -> None:
    """Queue a function for autograd to call at the end of the active backward pass."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def collectives() -> int:
    """Return the number of collectives begun in the default process group; 0 without a group."""
    from torch.distributed import group

    # Tested on torch 2.9, 2.11, 2.13; if the name is gone, launched cells end with AttributeError.
    world: Any = group.WORLD
    return 0 if world is None else int(world._get_sequence_number_for_group())
