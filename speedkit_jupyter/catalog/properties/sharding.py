"""Model, optimizers and data in parts on every rank, and whole again in the same objects."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.modules import (
    COMPILED_CALL,
    FORWARD_HOOKS,
    detach_iterator,
    forget_sharding,
    hook_tables,
    parameter_table,
    pop_hook,
)


def dtensor() -> tuple[Any, ...]:
    """Return the class of sharded tensors; empty before torch loads it (a second)."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module.DTensor,) if module else ()


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether some parameter is sharded."""
    return any(isinstance(one, dtensor()) for one in model.parameters())


def split(value: Any, part: Any) -> Any:
    """Return this rank's part of a tensor, laid out like `part`; other shapes stay unchanged."""
    if not isinstance(part, dtensor()) or getattr(value, "shape", None) != part.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = part.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, part.placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return a sharded tensor gathered, any other value unchanged; all ranks must call it."""
    return value.full_tensor() if isinstance(value, dtensor()) else value


class Gathered(Call):
    """The calls of a sharded module that is compiled or recomputed.

    torch's hooks, which gather and free its weights, run around them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._before = _taken(module, FORWARD_HOOKS[1])
        self._after = _taken(module, FORWARD_HOOKS[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before(self.module, args, kwargs)
        return self._after(self.module, args, self.below(*args, **kwargs))


def _taken(module: torch.nn.Module, kind: str) -> Callable[..., Any]:
    """Take the hook that `fully_shard` has just added off a module, and return it."""
    hooks = getattr(module, kind)
    key = next(key for key in reversed(hooks) if _is_torchs(hooks[key]))
    return pop_hook(module, kind, key)


class Sharded:
    """A block in which modules (the whole model last) are sharded and optimizers step the parts.

    All ranks must enter and leave it. Trained values are kept. `prefetch` is the number of blocks
    ahead for which weights are gathered; 0 leaves it to torch.
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
        self._optimizers = optimizers  # asked again at the end, for those made in the block
        self._arguments = arguments
        # The user's parameters, empty inside the block, by their names.
        self._originals: dict[str, torch.nn.Parameter] = {}
        self._before: list[tuple[Any, type, dict[str, Any], dict[str, set[Any]]]] = []

    def __enter__(self) -> list[tuple[torch.nn.Module, Call]]:
        """Return the calls to put around those by other parts of the plan."""
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
    """Have each block gather the weights of `number` blocks ahead, in both directions."""
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
    """Have the optimizers step the second tensor of each pair with the state of the first."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [pairs.get(id(p), (p, p))[1] for p in group["params"]]
        for old, new in pairs.values():
            if (state := optimizer.state.pop(old, None)) is not None:
                state.update({name: converted(value, new) for name, value in state.items()})
                optimizer.state[new] = state


@contextmanager
def unsynced(model: torch.nn.Module) -> Iterator[None]:
    """Keep the block's gradients on their rank; the next backward pass after it sums them."""
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
    """Return the parameters that optimizers step: of a sharded model, its parts."""
    from torch.distributed.fsdp import FSDPModule

    for module in (part for model in models for part in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
    return [parameter for model in models for parameter in model.parameters()]


def _surface(module: torch.nn.Module) -> tuple[Any, type, dict[str, Any], dict[str, set[Any]]]:
    """Return a weak reference to a module, its class, attributes, and the keys of its hooks."""
    own = dict(vars(module))
    hooks = {name: {*held} for name, held in hook_tables(module).items()}
    return weakref.ref(module), type(module), own, hooks


def _put_back(
    module: torch.nn.Module, kind: type, own: dict[str, Any], hooks: dict[str, set[Any]]
) -> None:
    """Remove the additions of `fully_shard`; the user's own hooks and attributes stay."""
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
        for key in gone:  # a hook's number is unique in all tables
            vars(module)[name].pop(key, None)


def _is_torchs(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")


def sharded(loader: DataLoader[Any], keep_batch: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's samples; the same loader in a single process.

    Args:
        loader: the loader of all samples.
        keep_batch: divide `batch_size` by the number of ranks, rather than keep it on each.

    Raises:
        SpeedKitError: a sampler of the user's own, or too few samples to split.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return loader
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = loader.batch_size
    if keep_batch:
        if not batch or batch % size:
            raise SpeedKitError(f"a batch of {batch} can't be split evenly over {size} ranks")
        batch //= size
    part = copy.copy(loader)  # with all arguments, a subclass's too
    detach_iterator(part)
    changed: dict[str, Any] = {"batch_size": batch}
    if isinstance(loader.dataset, IterableDataset):
        changed["dataset"] = Turns(loader.dataset, rank, size, batch or 1, loader.drop_last)
        if batch:
            changed["batch_sampler"] = BatchSampler(loader.sampler, batch, loader.drop_last)
    else:
        changed["batch_sampler"] = _batches(loader, batch or 1, rank, size)
    part.__dict__ |= changed  # torch refuses to set these after construction
    return part


def _batches(loader: DataLoader[Any], batch_size: int, rank: int, size: int) -> RankBatches:
    """Return this rank's batches. Raises SpeedKitError for an order that can't be split."""
    order: Any = loader.sampler
    samples = len(loader.dataset)  # type: ignore[arg-type]
    plain = type(loader.batch_sampler) is BatchSampler
    if not plain or type(order) not in (RandomSampler, SequentialSampler):
        kind = type(order if plain else loader.batch_sampler or loader).__name__
        raise SpeedKitError(f"a {kind} can't be split: give each rank a sampler of its own")
    if getattr(order, "replacement", False) or len(order) != samples:
        raise SpeedKitError("a sampler with replacement has no epoch to split")
    if samples < size:
        raise SpeedKitError(f"{count(samples, 'sample')} can't be split over {size} ranks")
    seed = [int(torch.randint(2**31, (), generator=loader.generator))]
    torch.distributed.broadcast_object_list(seed)
    shuffles = type(order) is RandomSampler
    all_of = batch_size * size
    return RankBatches(samples, all_of, loader.drop_last, shuffles, rank, size, seed[0])


@dataclass(eq=False)
class RankBatches(Sampler[list[int]]):
    """This rank's part of every batch of all ranks, in a new order each epoch.

    All ranks have the same number of batches, since each step waits for all of them. Last samples,
    if fewer than the ranks, join the batch before them. (torch's DistributedSampler repeats samples
    instead, and needs `set_epoch`.)
    """

    samples: int
    batch_of_all: int
    drop_last: bool
    shuffles: bool
    rank: int
    size: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_of_all)
        return whole + (rest >= self.size and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffles:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        self.epoch += 1
        edges = [number * self.batch_of_all for number in range(len(self) + 1)]
        if not self.drop_last:
            edges[-1] = self.samples
        for first, end in pairwise(edges):
            yield order[first:end][self.rank :: self.size].tolist()


@dataclass(eq=False)
class Turns(IterableDataset[Any]):
    """Every size-th sample of an iterable data set, from this rank's on.

    Last samples, if fewer than the ranks, are left out where they would make a batch on some ranks
    only: those ranks would wait for the others.
    """

    whole: Any
    rank: int
    size: int
    batch_size: int
    drop_last: bool

    def __iter__(self) -> Iterator[Any]:
        samples, number = iter(self.whole), 0
        while turn := list(islice(samples, self.size)):
            if len(turn) == self.size or (number % self.batch_size and not self.drop_last):
                yield from turn[self.rank : self.rank + 1]
            number += 1
