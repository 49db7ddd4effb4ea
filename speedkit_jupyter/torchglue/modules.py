"""Private names of torch's modules, optimizers, GradScalers, data loaders and TorchScript."""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping
from functools import partial
from importlib import import_module
from inspect import GEN_CREATED, getgeneratorstate
from operator import attrgetter
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.torchglue.private import found

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader
# --- modules ---

# The attributes with the dicts of a module's own parameters, buffers and submodules. `getattr` of a
# parameter's name would also return weights that `torch.nn.utils.parametrize` computes.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
# The attribute that `module(...)` calls instead of `forward` and hooks, if not None. If torch
# renames it, compiled code and recomputation are never called.
COMPILED_CALL = "_compiled_call_impl"
# The attribute of the wrapper `torch.compile(module)` that holds the module. If torch renames it, a
# compiled model counts as not compiled.
COMPILED_CHILD = "_orig_mod"
# The methods that move or cast a module's parameters, and that load a state_dict. If torch renames
# them, casting or loading a state_dict under a plan misses parameters that the plan has replaced.
CAST, LOAD = "_apply", "_load_from_state_dict"
# The attributes with the dicts of hooks, around forward and backward passes.
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


# These return the dicts of a module's own parts; writing to a dict replaces a part. They are
# functions, not attrgetter objects, because Dynamo traces functions.


def parameter_table(module: torch.nn.Module) -> MutableMapping[str, torch.nn.Parameter | None]:
    return module._parameters


def buffer_table(module: torch.nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    return module._buffers


def module_table(module: torch.nn.Module) -> MutableMapping[str, torch.nn.Module | None]:
    return module._modules


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the method that calls a module's hooks and `forward`, ignoring `COMPILED_CALL`."""
    return module._call_impl


def hook_tables(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dicts of a module's hooks and of the hooks' flags, by attribute name."""
    return {name: held for name, held in vars(module).items() if "_hooks" in name}


def pop_hook(module: torch.nn.Module, kind: str, key: int) -> Callable[..., Any]:
    """Remove a hook from a module and return it. `kind` is one of FORWARD_HOOKS."""
    getattr(module, f"{kind}_with_kwargs").pop(key, None)
    return getattr(module, kind).pop(key)  # type: ignore[no-any-return]


def global_hooks() -> list[dict[Any, Any]]:
    """Return the dicts of torch's global hooks for modules and for steps of optimizers."""
    # Their names begin with `_global_`. If torch renames them, a step's global hooks stay set.
    homes = map(import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    every = [pair for home in homes for pair in vars(home).items()]
    return [one for name, one in every if name.startswith("_global_") and isinstance(one, dict)]


def has_global_hooks() -> bool:
    """Return whether a global forward or backward hook for modules is registered."""
    return bool(found("torch.nn.modules.module", "_has_any_global_hook")())


def forget_sharding(module: torch.nn.Module) -> None:
    """Delete torch's record that a module is sharded: `fully_shard` then accepts it again."""
    found("torch.distributed._composable_state", "_module_state_mapping").pop(module, None)


# --- optimizers and gradient scalers ---

# The attributes that `fused=True` may set on an optimizer. If SCALES_IN_STEP is set, a GradScaler
# leaves unscaling to the fused kernel; otherwise it waits for the device at each step.
SCALES_IN_STEP = "_step_supports_amp_scaling"
FUSED_ATTRIBUTES = (SCALES_IN_STEP, "_need_device_dtype_check_for_fused")
# Returns a GradScaler's records of the current step (`stage` and more), by `id(optimizer)`.
scaler_states: Callable[[Any], MutableMapping[int, dict[str, Any]]] = attrgetter(
    "_per_optimizer_states"
)

# --- data loaders ---

# Returns the base class of DataLoader iterators.
loader_iterator = partial(found, "torch.utils.data.dataloader", "_BaseDataLoaderIter")
# The attributes of a DataLoader iterator that refer to the user's objects.
USERS_PARTS = ("_dataset", "_index_sampler", "_collate_fn")


def detach_iterator(loader: DataLoader[Any]) -> Any:
    """Remove and return a DataLoader's persistent iterator with its workers, or None."""
    iterator, loader._iterator = loader._iterator, None
    return iterator


def end_workers(iterator: Any) -> None:
    """Shut down a DataLoader iterator's workers, as its destructor does; ignore other objects."""
    if isinstance(iterator, loader_iterator()):
        getattr(iterator, "__del__", lambda: None)()


def same_epoch(iterator: Any) -> Any:
    """Return a copy of a DataLoader's iterator; None with workers, or for an IterableDataset."""
    if type(iterator).__name__ != "_SingleProcessDataLoaderIter":
        return None
    if hasattr(iterator._dataset_fetcher, "dataset_iter"):  # an IterableDataset
        return None
    order, sampler = iterator._sampler_iter, iterator._index_sampler
    begin = getattr(type(sampler).__iter__, "__code__", None)
    is_new = type(order) is GeneratorType and getgeneratorstate(order) == GEN_CREATED
    # A sampler that has not started is not shared: each iterator draws random numbers at its start.
    is_new = is_new and order.gi_code is begin
    orders = (order, iter(sampler)) if is_new else itertools.tee(order)
    other = object.__new__(type(iterator))  # torch's iterators can't be copied
    vars(other).update(vars(iterator))
    iterator._sampler_iter, other._sampler_iter = orders
    return other


def script_attributes(module: Any) -> dict[str, Any]:
    """Return the C++ attributes of a TorchScript module, including parameters and buffers."""
    # Tested on torch 2.9, 2.11, 2.13; if a name is gone, steps with such code raise AttributeError.
    if (inner := vars(module).get("_c")) is None:  # a traced module, which holds a script module
        return {}
    kind = found("torch._C", "ConcreteModuleType").from_jit_type(inner._type())
    return {name: inner.getattr(name) for name in kind.get_attributes()}


def set_script_attribute(module: Any, name: str, value: Any) -> None:
    """Set an attribute of a TorchScript module, bypassing the checks of its class."""
    vars(module)["_c"].setattr(name, value)


def script_constants(scripted: Any) -> list[Any]:
    """Return the constant tensors in a TorchScript function, or in a module's methods."""
    # Tested on torch 2.9, 2.11, 2.13; if a name is gone, steps with such code raise AttributeError.
    inner, code = getattr(scripted, "_c", None), [scripted]
    if inner is not None:
        code = [inner._get_method(name) for name in inner._method_names()]
    nodes = [node for one in code for node in one.graph.findAllNodes("prim::Constant")]
    return [n.t("value") for n in nodes if n.hasAttribute("value") and n.kindOf("value") == "t"]
