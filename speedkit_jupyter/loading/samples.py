"""A look at a few samples of a data set: how large they are, and whether they stay the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.tuned_loader import copied
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.torch_private import tree_leaves
from speedkit_jupyter.support.tracebacks import door

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# This many samples are looked at, for this long at the most.
MOST, LONGEST_S = 32, 1.0


@dataclass(frozen=True)
class Samples:
    """`keys` are the indices that were drawn; `draw_s` the seconds and `size_bytes` the size of a
    sample, `copy_s` the seconds of a copy of it. `is_random` where one differs from draw to draw,
    or draws random numbers; `own_generator` is the name of a generator of the data set's that it
    draws them from. `by_batches` where other samples of the batch change a sample
    (`__getitems__`); `why_not_sent` says why a worker can't send its batches.
    """

    keys: tuple[Any, ...] = ()
    draw_s: float = 0.0
    copy_s: float = 0.0
    size_bytes: int = 0
    is_random: bool = False
    own_generator: str = ""
    by_batches: bool = False
    device: str = "cpu"
    why_not_sent: str = ""


def indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Give the index of each sample of an epoch."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for drawn in sampler:
        yield from drawn if isinstance(drawn, list | tuple) else [drawn]


@door
def _drawn(dataset: Any, key: Any) -> Any:
    return dataset[key]


def look_at(loader: DataLoader[Any], walk: Walk) -> Samples:
    """Draw some samples of a map-style data set, each twice; `walk` went over what drawing reaches.

    What drawing changes is left so: call it while the step is isolated. Errors of the data set are
    the user's to see.
    """
    keys, first = list[Any](), list[Any]()
    drawn_s, copied_s = list[float](), list[float]()
    own = {walk.name(value): value for value in walk.found.values() if _is_generator(value)}
    before_all = {name: _state_of(generator) for name, generator in own.items()}
    is_random, begun_s = False, clock.now()
    for key in islice(indices(loader), MOST):
        if keys and clock.now() - begun_s > LONGEST_S:
            break
        before, at_s = list(map(_state_of, _shared_generators())), clock.now()
        sample = _drawn(loader.dataset, key)
        drawn_s.append(clock.now() - at_s)
        again = _drawn(loader.dataset, key)
        at_s = clock.now()
        copied(sample)
        copied_s.append(clock.now() - at_s)
        is_random |= list(map(_state_of, _shared_generators())) != before
        is_random |= not same(sample, again)
        keys.append(key)
        first.append(sample)
    used = (name for name, generator in own.items() if _state_of(generator) != before_all[name])
    generator = next(used, "")
    return Samples(
        tuple(keys),
        median(drawn_s or [0.0]),
        median(copied_s or [0.0]),
        sum(map(_size, first)) // max(len(first), 1),
        is_random or bool(generator),
        generator,
        _are_by_batches(loader.dataset, keys, first),
        _device(first),
    )


def _are_by_batches(dataset: Any, keys: Sequence[Any], samples: Sequence[Any]) -> bool:
    """Return whether samples that are drawn together differ from those drawn alone."""
    together = getattr(dataset, "__getitems__", None)
    if together is None or not keys:
        return False
    return not same(list(together(list(keys))), list(samples))


def same(one: Any, other: Any) -> bool:
    """Return whether two samples or batches hold the same, bit for bit."""
    if one is other:
        return True
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: Any, other: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return torch.equal(one, other) or _is_nan_alike(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):  # a picture of PIL's
        return bool(one.tobytes() == other.tobytes())
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return same(dict(one), dict(other))
    if is_dataclass(one) and hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    compares: Any = type(one).__eq__
    if compares is object.__eq__:
        return True  # an object of the user's that says nothing of what it holds
    try:
        return bool(one == other)
    except Exception:  # of tensors in it, say, which are not one truth
        return not hasattr(one, "__dict__") or same(vars(one), vars(other))


def _is_nan_alike(one: Any, other: Any) -> bool:
    """Return whether they are the same, NaN at the same places included."""
    import torch

    if not (one.is_floating_point() or one.is_complex()) or one.layout is not torch.strided:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_generator(value: Any) -> bool:
    """Return whether it is a generator that torch does not seed anew in each worker."""
    import numpy as np
    import torch

    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not any(value is one for one in _shared_generators())


def _shared_generators() -> list[Any]:
    import numpy as np
    import torch

    # The functions of these modules are methods of a generator that all code shares.
    shared: list[Any] = [random.random, np.random.random_sample]
    return [torch.default_generator, *(function.__self__ for function in shared)]


def _state_of(generator: Any) -> bytes:
    import numpy as np
    import torch

    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return str(generator.getstate()).encode()
    is_new = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_new else generator.get_state()
    with np.printoptions(threshold=sys.maxsize):
        return str(state).encode()


def _size(sample: Any) -> int:
    return sum(map(_size_of_leaf, tree_leaves(sample)))


def _size_of_leaf(leaf: Any) -> int:
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(leaf, str | bytes):
        return len(leaf)
    return len(leaf.tobytes()) if hasattr(leaf, "tobytes") else sys.getsizeof(leaf)


def _device(samples: Sequence[Any]) -> str:
    """Return where their tensors lie; an accelerator's name where any does."""
    import torch

    tensors = (leaf for leaf in tree_leaves(list(samples)) if isinstance(leaf, torch.Tensor))
    return next((one.device.type for one in tensors if one.device.type != "cpu"), "cpu")
