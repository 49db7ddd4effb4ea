"""Private attributes of torch's modules, optimizers, gradient scalers and data loaders.

Comments give the versions of torch in which a name was seen, and the effect without it. Each is
called in `tests/torchglue/test_modules.py`. Nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.torchglue.private import found

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

# Modules. 2.9, 2.11, 2.13: the dicts in which a module finds its own parts, by name. Attributes
# would also give weights that `torch.nn.utils.parametrize` computes. Without them, AttributeError
# or KeyError where plans put weights or layers in place of others.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"


def parameter_table(module: torch.nn.Module) -> MutableMapping[str, torch.nn.Parameter | None]:
    """Return the dict of a module's own parameters; writing to it puts one in place of another."""
    return module._parameters


def buffer_table(module: torch.nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """Return the dict of a module's own buffers; writing to it puts one in place of another."""
    return module._buffers


def module_table(module: torch.nn.Module) -> MutableMapping[str, torch.nn.Module | None]:
    """Return the dict of a module's children; writing to it puts one in place of another."""
    return module._modules


# 2.9, 2.11, 2.13: the attribute that `module(...)` calls in place of `forward` and its hooks, where
# it is not None. Without it, compiled code and recomputation would never be called.
COMPILED_CALL = "_compiled_call_impl"
# 2.9, 2.11, 2.13: the child in which the wrapper that `torch.compile(module)` returns keeps the
# module. Without it, a compiled model counts as one that is not compiled.
COMPILED_CHILD = "_orig_mod"


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the call of a module with its hooks, and without `COMPILED_CALL`."""
    # 2.9, 2.11, 2.13. Without it, AttributeError is raised at the first call under a plan.
    return module._call_impl


# 2.9, 2.11, 2.13: the dicts of hooks around calls. Without them, AttributeError is raised where
# a plan asks whether the user watches a module.
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def hook_tables(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dicts of a module's hooks, with and without keyword arguments, by their names."""
    return {name: held for name, held in vars(module).items() if "_hooks" in name}


def pop_hook(module: torch.nn.Module, kind: str, key: int) -> Callable[..., Any]:
    """Take a hook off a module, and return it. `kind` is one of FORWARD_HOOKS."""
    getattr(module, f"{kind}_with_kwargs").pop(key, None)
    return getattr(module, kind).pop(key)  # type: ignore[no-any-return]


def forget_sharding(module: torch.nn.Module) -> None:
    """Let `fully_shard` take a module again that was sharded and put back."""
    # 2.9, 2.11, 2.13. Without it, a second plan with `distributed` raises ImportError.
    found("torch.distributed._composable_state", "_module_state_mapping").pop(module, None)


# Optimizers and gradient scalers. 2.9, 2.11, 2.13: the attributes that `fused=True` gives an
# optimizer; by the first a GradScaler leaves unscaling to the kernel. Without it, the scaler waits
# for the device before every step.
SCALES_IN_STEP = "_step_supports_amp_scaling"
FUSED_ATTRIBUTES = (SCALES_IN_STEP, "_need_device_dtype_check_for_fused")


def scaler_states(scaler: torch.amp.GradScaler) -> MutableMapping[int, dict[str, Any]]:
    """Return a scaler's records of this step, by `id()` of the optimizer: `stage` and more."""
    # 2.9, 2.11, 2.13. Without it, AttributeError where a step under fp16 clips gradients, or steps
    # one optimizer twice.
    return scaler._per_optimizer_states


# 2.9, 2.11, 2.13: the function of `torch.nn.utils.clip_grad` that both ways of clipping call first.
# Without it, StepError: scaled gradients would be clipped.
CLIPPING_BEGINS = "_group_tensors_by_device_and_dtype"

# Data loaders. 2.9, 2.11, 2.13. Without these names AttributeError is raised when a step draws from
# a DataLoader, or when its settings are tuned.

# Returns the base class of the iterators that a DataLoader's loops draw from.
loader_iterator = partial(found, "torch.utils.data.dataloader", "_BaseDataLoaderIter")
# The attributes in which an iterator of a DataLoader keeps objects of the user's.
USERS_PARTS = ("_dataset", "_index_sampler", "_collate_fn")


def detach_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator with its workers that a loader keeps between epochs, and let it go.

    None if there is none. Copies of a loader share it until then.
    """
    iterator, loader._iterator = loader._iterator, None
    return iterator


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has some, as its destructor does."""
    if isinstance(iterator, loader_iterator()):
        getattr(iterator, "__del__", lambda: None)()


def draws_by_index(iterator: Any) -> bool:
    """Return whether an iterator of a DataLoader has no workers, and a data set with indices."""
    if type(iterator).__name__ != "_SingleProcessDataLoaderIter":
        return False
    return not hasattr(iterator._dataset_fetcher, "dataset_iter")  # of an IterableDataset


def batch_indices(iterator: Any) -> tuple[Any, Any]:
    """Return the iterator of the batches' indices in a DataLoader's iterator, and its source."""
    return iterator._sampler_iter, iterator._index_sampler


def set_batch_indices(iterator: Any, indices: Iterator[Any]) -> None:
    """Have a DataLoader's iterator draw these batches."""
    iterator._sampler_iter = indices


def script_attributes(module: Any) -> dict[str, Any]:
    """Return what a TorchScript module keeps in C++: parameters, buffers, attributes."""
    # 2.9, 2.11, 2.13. Without these names, AttributeError where a step reaches such a module.
    if (inner := vars(module).get("_c")) is None:  # a traced one, which holds another
        return {}
    kind = found("torch._C", "ConcreteModuleType").from_jit_type(inner._type())
    return {name: inner.getattr(name) for name in kind.get_attributes()}


def set_script_attribute(module: Any, name: str, value: Any) -> None:
    """Set an attribute of a TorchScript module, past the checks of its class."""
    vars(module)["_c"].setattr(name, value)


def script_constants(scripted: Any) -> list[Any]:
    """Return the tensors in the code of a TorchScript function, or of a module's methods."""
    # 2.9, 2.11, 2.13. Without these names, AttributeError where a step reaches such code.
    inner, code = getattr(scripted, "_c", None), [scripted]
    if inner is not None:
        code = [inner._get_method(name) for name in inner._method_names()]
    nodes = [node for one in code for node in one.graph.findAllNodes("prim::Constant")]
    return [n.t("value") for n in nodes if n.hasAttribute("value") and n.kindOf("value") == "t"]


def global_hooks() -> list[dict[Any, Any]]:
    """Return the hooks on the calls of all modules, and on the steps of all optimizers."""
    # 2.9, 2.11, 2.13: dicts whose names begin like this. Without them, such hooks stay.
    homes = map(import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    every = [pair for home in homes for pair in vars(home).items()]
    return [one for name, one in every if name.startswith("_global_") and isinstance(one, dict)]
