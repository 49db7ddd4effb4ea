"""Whether samples stay the same: drawn twice, and from a loader with other settings."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from statistics import median
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.settings import Settings, end_workers, rebuilt
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.lookup import attributes_of
from speedkit_jupyter.support.torch_private import tree_leaves
from speedkit_jupyter.support.tracebacks import user_code_boundary

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# This many samples are looked at, for this long at the most.
MOST, LONGEST_S = 32, 1.0
# Of each of two epochs this many batches are compared by their indices, or by their values.
EPOCHS, BATCHES, VALUES = 2, 64, 4


@dataclass(frozen=True)
class Samples:
    """`draw_s` are the seconds and `size_bytes` the size of a sample. `is_random` where one differs
    from draw to draw, or draws random numbers; `own_generator` is the name of a generator of the
    data set's that it draws them from.
    """

    draw_s: float = 0.0
    size_bytes: int = 0
    is_random: bool = False
    own_generator: str = ""
    device: str = "cpu"


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether its data set gives samples one after another, and none by an index."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what gives the indices of each batch, or of each sample without batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def drawing(loader: DataLoader[Any]) -> list[Any]:
    """Return what a sample is drawn with: what the data set holds, and its code for that.

    Not its other methods: what made it is no part of it.
    """
    dataset = loader.dataset
    methods = ("__getitem__", "__getitems__", "__iter__", "__next__", "__len__")
    code = [getattr(type(dataset), name, None) for name in methods]
    return [*filter(None, code), attributes_of(dataset), loader.collate_fn]


@user_code_boundary
def _drawn(dataset: Any, key: Any) -> Any:
    return dataset[key]


def look_at(loader: DataLoader[Any]) -> Samples:
    """Draw some samples of a map-style data set, each twice.

    What drawing changes is left so: call it while the step is isolated. Errors of the data set are
    the user's to see.
    """
    first, drawn_s, is_random, begun_s = list[Any](), list[float](), False, clock.now()
    walk, shared = Walk(drawing(loader)), _shared_generators()
    own = {walk.name(value): value for value in walk.found.values() if _is_own(value, shared)}
    before = _states(own.values())
    for key in islice(_indices(loader), MOST):
        if first and clock.now() - begun_s > LONGEST_S:
            break
        before_each, at_s = _states(shared), clock.now()
        first.append(_drawn(loader.dataset, key))
        drawn_s.append(clock.now() - at_s)
        again = _drawn(loader.dataset, key)
        is_random |= _states(shared) != before_each or not same(first[-1], again)
    used = zip(own, _states(own.values()), before, strict=True)
    generator = next((name for name, now, then in used if now != then), "")
    return Samples(
        median(drawn_s or [0.0]),
        sum(map(_size, tree_leaves(first))) // max(len(first), 1),
        is_random or bool(generator),
        generator,
        _device(first),
    )


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    for drawn in index_sampler(loader):
        yield from drawn if isinstance(drawn, list | tuple) else [drawn]


def _shared_generators() -> list[Any]:
    """Return the generators that torch seeds in each worker."""
    import numpy as np
    import torch

    # The functions of these modules are methods of a generator that all code shares.
    shared: list[Any] = [random.random, np.random.random_sample]
    return [torch.default_generator, *(function.__self__ for function in shared)]


def _is_own(value: Any, shared: Sequence[Any]) -> bool:
    import numpy as np
    import torch

    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not any(value is one for one in shared)


def _states(generators: Any) -> list[bytes]:
    import torch

    kept = (one.get_state() if isinstance(one, torch.Generator) else one for one in generators)
    return [
        one.numpy().tobytes() if isinstance(one, torch.Tensor) else bytes(ForkingPickler.dumps(one))
        for one in kept
    ]


def _size(leaf: Any) -> int:
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(leaf.tobytes()) if hasattr(leaf, "tobytes") else sys.getsizeof(leaf)


def _device(samples: Sequence[Any]) -> str:
    """Return where their tensors lie; an accelerator's name where any does."""
    kinds = (getattr(getattr(leaf, "device", None), "type", "cpu") for leaf in tree_leaves(samples))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def same(one: Any, other: Any) -> bool:
    """Return whether two samples or batches hold the same, bit for bit."""
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if not one.is_floating_point() or one.layout is not torch.strided:
            return torch.equal(one, other)
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if hasattr(one, "tobytes"):  # an array of NumPy's, a picture of PIL's
        return getattr(one, "dtype", 0) == getattr(other, "dtype", 0) and (
            one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return same(dict(one), dict(other))
    if is_dataclass(one):
        return same(attributes_of(one), attributes_of(other))
    if type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        return True  # an object of the user's that says nothing of what it holds
    with suppress(Exception):  # of tensors in it, say, which are not one truth
        return bool(one == other)
    return False


class Indices:
    """A data set that gives the index in place of the sample."""

    def __getitem__(self, index: Any) -> Any:
        return index


def as_it_is(batch: Any) -> Any:
    """Return the batch: a collate_fn of a file, which any worker can import."""
    return batch


def difference(loader: DataLoader[Any], settings: Settings, settle: Callable[[], object]) -> str:
    """Return in words how a loader with these settings differs; empty where it does not.

    The code between batches draws random numbers, as a step does. A data set with indices is asked
    for these alone: its samples may be random. `settle` puts generators and samplers back to where
    they began.
    """
    inside: dict[str, Any] = {}
    if not is_iterable(loader):
        inside = {"dataset": Indices(), "collate_fn": as_it_is, "pin_memory": False}
    drawn = []
    for one in (Settings.of(loader), settings):
        settle()
        other = rebuilt(loader, one)
        other.__dict__ |= inside
        drawn.append(_batches(other, BATCHES if inside else VALUES))
    return "" if same(*drawn) else "it gives other batches, or in another order"


def _batches(loader: DataLoader[Any], batches: int) -> list[Any]:
    """Return what it gives, and random numbers that are drawn in between."""
    import numpy as np
    import torch

    found = []
    try:
        for _ in range(EPOCHS):
            for batch in islice(iter(loader), batches):
                found += [batch, torch.rand(()).item(), random.random(), float(np.random.rand())]
    finally:
        end_workers(loader)
    return found
