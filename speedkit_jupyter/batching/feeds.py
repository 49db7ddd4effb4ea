"""How a step gets batches of another size: as an argument, from its loader, or by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CellType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.samples import length_of
from speedkit_jupyter.support.torch_private import tree_leaves

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

UNKNOWN = (
    "what is a batch in this step? Give a function that takes one, and its batch or loader; or one "
    "that reads tensors with the same first dimension"
)
UNREAD = (
    "the step takes no argument, and not everything that was given as its batch is a tensor that "
    "it reads by a name of its own: leave out what is not"
)


class Feed(Protocol):
    """`now` is the size of the batches that there are, `source` says in words where they are;
    `sample_bytes` are those of one sample.
    """

    now: int
    source: str
    sample_bytes: float

    def of(self, number: int) -> AbstractContextManager[Callable[[], int]]:
        """In the block the step gets batches of this size; the call says how many samples it was
        given since the last one.
        """


class Given:
    """The step takes the batch: `put` is called with it before each call."""

    def __init__(self, batch: Sequence[Any], put: Callable[[Sequence[Any]], object]) -> None:
        now = length_of(list(batch))
        if now is None:
            raise StepError("there is no tensor in the batch whose first dimension is its size")
        if not now:
            raise StepError("the batch is empty: give one with samples in it")
        self.now, self.source = now, "the batch that it takes"
        self._batch, self._put = batch, put
        self.sample_bytes = _bytes(list(batch)) / now

    @contextmanager
    def of(self, number: int) -> Iterator[Callable[[], int]]:
        """The argument has this size."""
        self._put(resized(list(self._batch), number))
        try:
            yield lambda: number
        finally:
            self._put(self._batch)


class Loaded:
    """The step goes through a loader, which gives one batch then, loaded before."""

    def __init__(self, loader: DataLoader[Any], batch: Any, name: str = "its loader") -> None:
        now = length_of(batch)
        if now is None:
            raise StepError("there is no tensor in the loader's batches")
        self.now, self.source = now, f"{name}, one batch a call, loaded before"
        self._loader, self._batch = loader, batch
        self.sample_bytes = _bytes(batch) / max(now, 1)

    @contextmanager
    def of(self, number: int) -> Iterator[Callable[[], int]]:
        """Every loop over the loader gets one batch of this size."""
        from torch.utils.data import DataLoader

        batch, given = resized(self._batch, number), [0]

        def instead(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(asked: DataLoader[Any]) -> Any:
                if asked is not self._loader:
                    return original(asked)
                given[0] += number
                return iter([batch])

            return call

        def samples() -> int:
            found, given[0] = given[0], 0
            return found

        with patched(DataLoader, "__iter__", instead):
            yield samples


class Named:
    """The step reads tensors by their names: those that have the same first dimension, of these
    only the ones in `batch`, if one is given. Raises StepError.
    """

    def __init__(self, walk: Walk, apart: Iterable[Any], batch: Sequence[Any] = ()) -> None:
        known, given = set(map(id, apart)), set(map(id, batch))
        found = [one for one in _places(walk) if id(one.value) not in known]
        found = [one for one in found if not given or id(one.value) in given]
        if len({id(one.value) for one in found}) < len(given):
            raise StepError(UNREAD)
        lengths = Counter(length_of(one.value) for one in found).most_common()
        self.now = next((length for length, _ in lengths if length and length > 1), 0)
        if not self.now:
            raise StepError(UNKNOWN)
        self._places = [one for one in found if length_of(one.value) == self.now]
        each = {id(one.value): one.value for one in self._places}
        self.sample_bytes = _bytes(list(each.values())) / self.now
        names = ", ".join(sorted({one.name for one in self._places}))
        self.source = f"{names} ({self.now} samples each)"

    @contextmanager
    def of(self, number: int) -> Iterator[Callable[[], int]]:
        """The names stand for tensors of this size."""
        try:
            made = {id(one.value): resized(one.value, number) for one in self._places}
            for one in self._places:
                one.bind(made[id(one.value)])
            yield lambda: number
        finally:
            for one in self._places:
                one.bind(one.value)


class _Place(NamedTuple):
    """A variable, and the batch that it holds."""

    name: str
    value: Any
    bind: Callable[[Any], object]


def _places(walk: Walk) -> Iterator[_Place]:
    """Give the names of namespaces and closures that hold tensors."""
    import torch

    empty, found = CellType(), list[_Place]()
    for holder in walk.near:
        if isinstance(holder, Names):
            for name in holder.all:
                bind = partial(holder.space.__setitem__, name)
                found.append(_Place(name, holder.space.get(name), bind))
        elif isinstance(holder, CellType) and holder != empty:
            value = holder.cell_contents
            found.append(_Place(walk.name(value), value, partial(setattr, holder, "cell_contents")))
    for one in found:
        if isinstance(one.value, torch.Tensor) and not isinstance(one.value, torch.nn.Parameter):
            yield one


def _bytes(batch: Any) -> int:
    """Return those of all tensors in it."""
    import torch

    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def resized(value: Any, number: int) -> Any:
    """Return `number` samples: the first ones, or all of them over and over."""
    length = length_of(value)
    return value if length is None else _resized(value, length, number)


def _resized(value: Any, length: int, number: int) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if not value.ndim or len(value) != length:
            return value
        samples = value.detach()[torch.arange(number, device=value.device) % length]
        if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
            samples = samples.contiguous(memory_format=torch.channels_last)
        return samples.requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray):
        same = value.ndim and len(value) == length
        return value[np.arange(number) % length] if same else value
    if isinstance(value, Mapping):
        return {key: _resized(one, length, number) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == length and length_of(value) is None:
            return type(value)(value[at % length] for at in range(number))
        parts = [_resized(one, length, number) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
