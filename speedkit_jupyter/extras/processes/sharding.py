"""Shard modules with torch's `fully_shard`, and restore the original parameters afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from speedkit_jupyter.catalog.model_changes.calls import Call
from speedkit_jupyter.torchglue import modules as torch_modules


def dtensor() -> tuple[Any, ...]:
    """Return (DTensor,) for isinstance(), or () if not imported yet: importing takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module.DTensor,) if module else ()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether any parameter is sharded."""
    return any(isinstance(one, dtensor()) for one in model.parameters())


def split(value: Any, part: Any) -> Any:
    """Return `value` sharded like `part`, or unchanged if `part` is no DTensor of equal shape."""
    if not isinstance(part, dtensor()) or getattr(value, "shape", None) != part.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = part.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, part.placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return a DTensor's full tensor, or another value unchanged; all ranks must call this."""
    return value.full_tensor() if isinstance(value, dtensor()) else value


class Gathered(Call):
    """A call wrapper that runs the hooks of `fully_shard` around compiled or recomputed calls."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._before = _taken(module, torch_modules.FORWARD_HOOKS[1])
        self._after = _taken(module, torch_modules.FORWARD_HOOKS[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before(self.module, args, kwargs)
        return self._after(self.module, args, self.below(*args, **kwargs))


def _taken(module: torch.nn.Module, kind: str) -> Callable[..., Any]:
    """Remove and return the hook that `fully_shard` has just added to a module."""
    hooks = getattr(module, kind)
    key = next(key for key in reversed(hooks) if _is_torchs(hooks[key]))
    return torch_modules.pop_hook(module, kind, key)


class Sharded:
    """A context manager that shards `modules` (the last is the model); optimizers step the shards.

    All ranks must enter and exit. The exit restores the user's parameters, with trained values.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        **arguments: Any,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._optimizers = optimizers  # called again at the end, to include new optimizers
        self._arguments = arguments
        # The user's parameters by name; inside the block, these hold no values.
        self._originals: dict[str, torch.nn.Parameter] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> list[tuple[torch.nn.Module, Call]]:
        """Shard the modules; return each module that has call wrappers, with its `Gathered`."""
        from torch.distributed.fsdp import fully_shard

        modules = [module for one in self._modules if (module := one()) is not None]
        model = modules[-1]
        optimizers = self._optimizers()
        self._originals = dict(model.named_parameters(remove_duplicate=False))
        self._undo = [_undo(module) for module in model.modules()]
        for module in modules:
            fully_shard(module, **self._arguments)
        parts = dict(model.named_parameters(remove_duplicate=False))
        pairs = {id(old): (old, parts[name]) for name, old in self._originals.items()}
        for old, part in pairs.values():
            if old.grad is not None:
                part.grad = split(old.grad, part)
        _repoint(optimizers, pairs, split)
        for old, _ in pairs.values():
            old.grad, old.data = None, torch.empty(0, dtype=old.dtype, device=old.device)
        layered = [module for module in modules if torch_modules.COMPILED_CALL in vars(module)]
        return [(module, Gathered(module)) for module in layered]

    def __exit__(self, kind: object, *error: object) -> None:
        model = self._modules[-1]()
        if model is None or kind is GeneratorExit:  # the model was deleted, or the plan abandoned
            return
        parts = dict(model.named_parameters(remove_duplicate=False))
        pairs = {id(parts[name]): (parts[name], old) for name, old in self._originals.items()}
        for part, old in pairs.values():
            old.data = whole(part).detach()
            old.grad = None if part.grad is None else whole(part.grad).detach()
        _repoint(self._optimizers(), pairs, lambda value, _: whole(value))
        for undo in self._undo:
            undo()
        for name, old in self._originals.items():
            owner, _, last = name.rpartition(".")
            torch_modules.parameter_table(model.get_submodule(owner))[last] = old
        self._originals, self._undo = {}, []
        gc.collect()  # torch's state of a sharded module is part of a reference cycle


def _repoint(
    optimizers: Sequence[torch.optim.Optimizer], pairs: dict[int, tuple[Any, Any]], converted: Any
) -> None:
    """Make optimizers step the second tensor of each pair, with the first tensor's state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [pairs.get(id(p), (p, p))[1] for p in group["params"]]
        for old, new in pairs.values():
            if (state := optimizer.state.pop(old, None)) is not None:
                state.update({name: converted(value, new) for name, value in state.items()})
                optimizer.state[new] = state


def _undo(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that undoes a later `fully_shard`, but keeps the user's hooks."""
    reference, kind, own = weakref.ref(module), type(module), {*vars(module)}
    hooks = {name: {*held} for name, held in torch_modules.hook_tables(module).items()}

    def undo() -> None:
        if (module := reference()) is None:
            return
        module.__class__ = kind
        torch_modules.forget_sharding(module)
        for name in vars(module).keys() - own:
            if "fsdp" in name.lower() or "composable" in name:
                del vars(module)[name]
        tables = {name: vars(module)[name] for name in hooks}
        for name, table in tables.items():
            added = [key for key in table if key not in hooks[name] and _is_torchs(table[key])]
            for key, other in product(added, tables.values()):  # hook ids are unique
                other.pop(key, None)

    return undo


def _is_torchs(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")
