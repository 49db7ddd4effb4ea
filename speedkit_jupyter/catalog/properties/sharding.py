"""A model in parts on every rank by `fully_shard`, and full again, in the same objects."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.torchglue.modules import (
    COMPILED_CALL,
    FORWARD_HOOKS,
    forget_sharding,
    hook_tables,
    parameter_table,
    pop_hook,
)


def dtensor() -> tuple[Any, ...]:
    """Return the class of sharded tensors; empty before torch loads it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module.DTensor,) if module else ()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether some parameter is a part of a tensor that lies on several ranks."""
    return any(isinstance(one, dtensor()) for one in model.parameters())


def split(value: Any, part: Any) -> Any:
    """Return this rank's part of a tensor that all ranks have, laid out as `part` is.

    Anything of another shape, as a number of steps, stays as it is.
    """
    if not isinstance(part, dtensor()) or getattr(value, "shape", None) != part.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = part.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, part.placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return a sharded tensor gathered, anything else as it is; every rank has to call it."""
    return value.full_tensor() if isinstance(value, dtensor()) else value


class Gathered(Call):
    """The calls of a sharded module that is compiled, or computed again: torch's hooks, which
    gather its weights and free them, run around all that, as if `fully_shard` wrapped it last.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._before = _taken(module, FORWARD_HOOKS[1])
        self._after = _taken(module, FORWARD_HOOKS[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before(self.module, args, kwargs)
        return self._after(self.module, args, self.below(*args, **kwargs))


def _taken(module: torch.nn.Module, kind: str) -> Callable[..., Any]:
    """Return the hook that `fully_shard` has just put on a module, and take it off."""
    hooks = getattr(module, kind)
    key = next(key for key in reversed(hooks) if _is_torchs(hooks[key]))
    return pop_hook(module, kind, key)


class Sharded:
    """A block in which modules, the whole model last, are sharded, and optimizers step their parts.

    Every rank enters and leaves it. Values that are trained in it are kept. `prefetch` is how many
    blocks ahead weights are gathered; 0 leaves that to torch.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        prefetch: int = 0,
        **arguments: Any,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._prefetch = prefetch
        self._optimizers = optimizers  # asked again at the end, for those that were made meanwhile
        self._arguments = arguments
        # The user's parameters, empty meanwhile, by the names that the model has for them.
        self._originals: dict[str, torch.nn.Parameter] = {}
        self._before: list[tuple[Any, type, dict[str, Any], dict[str, set[Any]]]] = []

    def __enter__(self) -> list[tuple[torch.nn.Module, Call]]:
        """Return the calls that go around those that other parts of the plan have put there."""
        from torch.distributed.fsdp import fully_shard

        modules = [module for one in self._modules if (module := one()) is not None]
        model = modules[-1]
        optimizers = self._optimizers()
        self._originals = dict(model.named_parameters(remove_duplicate=False))
        self._before = [_surface(module) for module in model.modules()]
        for module in modules:
            fully_shard(module, **self._arguments)
        _prefetch(modules, self._prefetch)
        parts = dict(model.named_parameters(remove_duplicate=False))
        pairs = {id(old): (old, parts[name]) for name, old in self._originals.items()}
        for old, part in pairs.values():
            if old.grad is not None:
                part.grad = split(old.grad, part)
        _repoint(optimizers, pairs, split)
        for old, _ in pairs.values():
            old.grad, old.data = None, torch.empty(0, dtype=old.dtype, device=old.device)
        layered = [module for module in modules if COMPILED_CALL in vars(module)]
        return [(module, Gathered(module)) for module in layered]

    def __exit__(self, *error: object) -> None:
        model = self._modules[-1]()
        if model is None:
            return
        optimizers = self._optimizers()
        parts = dict(model.named_parameters(remove_duplicate=False))
        pairs = {id(parts[name]): (parts[name], old) for name, old in self._originals.items()}
        for part, old in pairs.values():
            old.data = whole(part).detach()
            old.grad = None if part.grad is None else whole(part.grad).detach()
        _repoint(optimizers, pairs, lambda value, _: whole(value))
        for reference, kind, own, hooks in self._before:
            if (module := reference()) is not None:
                _put_back(module, kind, own, hooks)
        for name, old in self._originals.items():
            owner, _, last = name.rpartition(".")
            parameter_table(model.get_submodule(owner))[last] = old
        self._originals, self._before = {}, []
        gc.collect()  # torch's state of a sharded module refers to itself


def _prefetch(modules: Sequence[Any], number: int) -> None:
    """Have each block gather the weights of as many others ahead, in both directions."""
    if not number:
        return
    *blocks, model = modules
    model.set_modules_to_forward_prefetch(blocks[:number])
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + number])
        earlier = blocks[max(0, index - number) : index]
        block.set_modules_to_backward_prefetch(earlier[::-1])


def _repoint(
    optimizers: Sequence[torch.optim.Optimizer], pairs: dict[int, tuple[Any, Any]], converted: Any
) -> None:
    """Have the optimizers step the second of each pair, with the state of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [pairs.get(id(p), (p, p))[1] for p in group["params"]]
        for old, new in pairs.values():
            if (state := optimizer.state.pop(old, None)) is not None:
                state.update({name: converted(value, new) for name, value in state.items()})
                optimizer.state[new] = state


@contextmanager
def unsynced(model: torch.nn.Module) -> Iterator[None]:
    """Have gradients of the block stay on their rank: the next backward pass after it sums them."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def own_parameters(models: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return what optimizers step: of a sharded model the parts, which a forward pass may hide."""
    from torch.distributed.fsdp import FSDPModule

    for module in (part for model in models for part in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
    return [parameter for model in models for parameter in model.parameters()]


def _surface(module: torch.nn.Module) -> tuple[Any, type, dict[str, Any], dict[str, set[Any]]]:
    """Return a module's class, attributes and the keys of its hooks."""
    own = dict(vars(module))
    hooks = {name: {*held} for name, held in hook_tables(module).items()}
    return weakref.ref(module), type(module), own, hooks


def _put_back(
    module: torch.nn.Module, kind: type, own: dict[str, Any], hooks: dict[str, set[Any]]
) -> None:
    """Take away what `fully_shard` has added; the user's own hooks and attributes stay."""
    module.__class__ = kind
    forget_sharding(module)
    for name in [name for name in vars(module) if name not in own]:
        if "fsdp" in name.lower() or "composable" in name:
            del vars(module)[name]
    gone = {
        key
        for name, keys in hooks.items()
        for key, hook in vars(module)[name].items()
        if key not in keys and _is_torchs(hook)
    }
    for name in hooks:
        for key in gone:  # a hook's number is its own in all of them
            vars(module)[name].pop(key, None)


def _is_torchs(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")
