"""torch's private names of tensors, operators, modes and autograd.

`dynamo.py`, `inductor.py` and `modules.py` have the others, and no other folder has any:
`tests/torchglue/test_private_names.py` finds them. Comments give the versions of torch in which a
name was seen, and the effect without it; `make versions` runs the tests under each version. Each
name is called in `tests/torchglue/`.

Nothing is imported before it is used. A name that torch has moved raises AttributeError or
ImportError. `missing_name` tells which, and the entry of the catalog that needs it is declined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def missing_name(error: BaseException) -> str:
    """Return the name that torch does not have (any more), if the error says that; else empty."""
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
    """Return `name` of the module `home`, which is imported if needed."""
    return getattr(sys.modules.get(home) or import_module(home), name)


def _function(home: str, name: str) -> Callable[..., Any]:
    """Return torch's function, looked up when it is called: this module loads nothing."""
    return lambda *args, **kwargs: found(home, name)(*args, **kwargs)


def cached_functions(owner: Any) -> list[Any]:
    """Return the functions of a module or class that remember their results."""
    return [one for one in vars(owner).values() if hasattr(one, "cache_clear")]


_CORE, _AUTOGRAD, _FUNCTORCH = "torch._C", "torch._C._autograd", "torch._C._functorch"
_PYTREE, _DISPATCH = "torch.utils._pytree", "torch.utils._python_dispatch"

# Settings.

# 2.9, 2.11, 2.13: the order in which attention kernels are tried, as numbers of SDPBackend; the
# public `sdpa_kernel` sets it for a block only. Without them, `sdpa` is declined.
attention_order = _function(_CORE, "_get_sdp_priority_order")
set_attention_order = _function(_CORE, "_set_sdp_priority_order")

# 2.13, and 2.11 without the first: the settings of CUDA's allocator, as text. Without them,
# `allocator` is declined.
allocator_settings = _function(_CORE, "_accelerator_getAllocatorSettings")
ALLOCATOR_SETTER = f"{_CORE}._accelerator_setAllocatorSettings"
set_allocator_settings = _function(*ALLOCATOR_SETTER.rsplit(".", 1))


def has_allocator_settings() -> bool:
    """Return whether the settings of CUDA's allocator can be read."""
    return hasattr(import_module(_CORE), "_accelerator_getAllocatorSettings")


# Tensors.


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors refer to a tensor's memory, some of torch's own included."""
    # 2.9, 2.11, 2.13. Without it, `channels_last` raises AttributeError.
    return int(found(_CORE, "_storage_Use_Count")(tensor.untyped_storage()._cdata))


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set how often tensors count as written, which an earlier graph compares at its backward pass.

    Only for tensors that hold their earlier values again.
    """
    # 2.9, 2.11, 2.13. Without it, AttributeError while tensors are put back.
    found(_AUTOGRAD, "_unsafe_set_version_counter")(tuple(tensors), tuple(versions))


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which torch doesn't count.

    2.9, 2.11, 2.13. Without it, AttributeError.
    """
    return 0 if tensor.is_inference() else tensor._version


def untyped(storage: Any) -> tuple[torch.UntypedStorage, torch.dtype | None]:
    """Return a storage as bytes, and their dtype if the storage has one."""
    # 2.9, 2.11, 2.13. Without it, storages with a dtype go to workers as bytes.
    own = getattr(storage, "_untyped_storage", None)
    return (storage, None) if own is None else (own, storage.dtype)


def typed(storage: torch.UntypedStorage, dtype: torch.dtype | None) -> Any:
    """Return the storage that `untyped` was given."""
    import torch

    # 2.9, 2.11, 2.13. Without the second one, a warning.
    more: dict[str, Any] = {"dtype": dtype, "_internal": True}
    return storage if dtype is None else torch.TypedStorage(wrap_storage=storage, **more)


def address(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one lives."""
    # 2.9, 2.11, 2.13. Without it, AttributeError where objects go to workers.
    return int(storage._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view was made of; a tensor that is no view itself."""
    # 2.9, 2.11, 2.13. Without it, AttributeError under `inference`.
    return tensor if tensor._base is None else tensor._base


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and the values of a sparse COO tensor.

    The public methods refuse a tensor that is not coalesced.
    """
    # 2.9, 2.11, 2.13. Without them, AttributeError where a step reaches such a tensor.
    return [tensor._indices(), tensor._values()]


def nested_sizes(tensor: torch.Tensor) -> list[list[int]]:
    """Return the shapes of the parts of a nested tensor with the strided layout."""
    # 2.9, 2.11, 2.13. Without it, AttributeError where a step reaches such a tensor.
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


# 2.9, 2.11, 2.13: the dicts of a tensor's hooks; None without hooks. Without the first, hooks that
# a step registers stay; without the second, so do hooks on finished gradients, and a micro-batch
# would run them once for each part.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Return whether hooks run once the gradient of a leaf has been accumulated."""
    return bool(getattr(leaf, TENSOR_HOOKS[1], None))


# 2.9, 2.11, 2.13: whether a tensor's values are in tensors of its attributes, and whether it is one
# of `torch.func`'s. Without them, AttributeError where state is copied.
is_made_of_tensors = _function(_DISPATCH, "is_traceable_wrapper_subclass")
is_transformed = _function(_FUNCTORCH, "is_functorch_wrapped_tensor")


def is_transforming() -> bool:
    """Return whether `vmap`, `grad` or another of `torch.func`'s transforms is at work."""
    # 2.9, 2.11, 2.13. Without it, AttributeError at the first compiled call.
    return found(_FUNCTORCH, "peek_interpreter_stack")() is not None


# 2.9, 2.11, 2.13: containers as torch's own transformations see them; there is no public name.
# Without them, ImportError wherever batches are walked.
tree_leaves = _function(_PYTREE, "tree_leaves")
tree_map = _function(_PYTREE, "tree_map")
tree_flatten = _function(_PYTREE, "tree_flatten")
tree_unflatten = _function(_PYTREE, "tree_unflatten")

# Operators.

# 2.9, 2.11, 2.13: the product of two int8 matrices in int32, as torchao's layers call it. Without
# it, `int8` is declined.
int8_product = _function("torch", "_int_mm")
# 2.9, 2.11, 2.13: oneDNN's float32 linear layer, in code that runs elsewhere. Without it, `gemm` is
# declined.
ONEDNN_LINEAR = "torch.ops.mkldnn._linear_pointwise"
# 2.9, 2.11, 2.13: takes back all that a `torch.library.Library` registered. In a comment of
# generated code alone.
LIBRARY_DESTROY = "_destroy"


def linear_by_onednn() -> Callable[..., torch.Tensor]:
    """Return oneDNN's float32 product of two matrices; AttributeError in a build without oneDNN."""
    import torch

    return torch.ops.mkldnn._linear_pointwise.default  # type: ignore[no-any-return]


def operator_schema(operator: Any) -> Any:
    """Return an operator's schema: its `name` (`aten::addmm`), `arguments`, and `is_mutable`."""
    # 2.9, 2.11, 2.13. Without it, AttributeError in the accuracy check.
    return operator._schema


# 2.9, 2.11, 2.13: operators whose names begin with `_`. Without them: advice on attention by hand,
# slow masks and embeddings sees less of the time; a GradScaler's kernels are run in float64, which
# they refuse; copies count as arithmetic; the graph break that `.item()` causes has torch's words.
SOFTMAX = "aten::_softmax"
SDPA = "aten::_scaled_dot_product"
EMBEDDING_BAG_BACKWARD = ("aten::_embedding_bag_dense_backward", "aten::_embedding_bag_backward")
MULTIPLY_ALL = "_foreach_mul_"
GRAD_SCALER = "_amp_"
CAST = "_to_copy"
READ_A_NUMBER = "_local_scalar_dense"

# Modes. 2.9, 2.11, 2.13. Without them, AttributeError or ImportError where operators are seen: in
# the accuracy check, in profiles and in advice.

# A block in which no mode sees operators; the innermost of the modes that see operators, and of
# those that see torch's functions.
without_dispatch_modes = _function(_DISPATCH, "_disable_current_modes")
innermost_dispatch_mode = _function(_DISPATCH, "_get_current_dispatch_mode")
innermost_function_mode = _function("torch.overrides", "_get_current_function_mode")
# Returns the class of the modes that see every operator.
dispatch_mode = partial(found, _DISPATCH, "TorchDispatchMode")

# Autograd. 2.9, 2.11, 2.13. Without these, AttributeError in profiles, in compiled calls and under
# `activation_checkpointing`.

# Whether a profiler is at work, the number that the next node of the graph gets, the node whose
# backward pass is computed in this thread (None outside of one), and whether hooks on saved tensors
# are allowed here.
is_profiled = _function(_AUTOGRAD, "_profiler_enabled")
sequence_number = _function(_AUTOGRAD, "_get_sequence_nr")
current_node = _function(_CORE, "_current_autograd_node")
can_hook_saved_tensors = _function(_AUTOGRAD, "_saved_tensors_hooks_is_enabled")


def autocast_dtype(block: torch.autocast) -> torch.dtype | None:
    """Return the dtype that an autocast block computes in; None where it is off."""
    # 2.9, 2.11, 2.13. Without it, AttributeError where the accuracy check looks for autocast.
    return block.fast_dtype if block._enabled else None


def after_backward(callback: Callable[[], None]) -> None:
    """Call the function at the end of the backward pass that runs."""
    import torch

    # 2.9, 2.11, 2.13. Without it, AttributeError under `distributed: ddp`.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def collectives(group: Any) -> int:
    """Return how many collectives this process has entered in a group; 0 without one."""
    # 2.9, 2.11, 2.13. Without it, AttributeError at the end of a launched cell.
    return 0 if group is None else int(group._get_sequence_number_for_group())
