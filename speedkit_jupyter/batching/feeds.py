"""How a step gets batches of another size: as an argument, from its loader, or by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CellType
from typing import TYPE_CHECKING, Any, Protocol

from speedkit_jupyter.batching.resized import resized
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.samples import length_of

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
    `sample_bytes` are those of the batch itself for each sample.
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
        """The argument."""
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
        """Whoever loops over the loader gets it."""
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
        known, given = {id(value) for value in apart}, {id(value) for value in batch}
        found = [
            place
            for place in _places(walk)
            if id(place.value) not in known and (not given or id(place.value) in given)
        ]
        if len({id(place.value) for place in found}) < len(given):
            raise StepError(UNREAD)
        lengths = Counter(length_of(place.value) for place in found)
        likely = [
            length for length, _ in lengths.most_common() if length is not None and length > 1
        ]
        if not likely:
            raise StepError(UNKNOWN)
        self.now = likely[0]
        self._places = [place for place in found if length_of(place.value) == self.now]
        each = {id(place.value): place.value for place in self._places}
        self.sample_bytes = _bytes(list(each.values())) / self.now
        names = ", ".join(sorted({place.name for place in self._places}))
        self.source = f"{names} ({self.now} samples each)"

    @contextmanager
    def of(self, number: int) -> Iterator[Callable[[], int]]:
        """The names stand for others."""
        try:
            made = {id(place.value): resized(place.value, number) for place in self._places}
            for place in self._places:
                place.bind(made[id(place.value)])
            yield lambda: number
        finally:
            for place in self._places:
                place.bind(place.value)


def _bytes(batch: Any) -> int:
    """Of all tensors in it."""
    import torch
    from torch.utils._pytree import tree_leaves

    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


class _Place:
    """A variable, and the batch that it holds."""

    def __init__(self, name: str, value: Any, bind: Callable[[Any], object]) -> None:
        self.name, self.value, self.bind = name, value, bind


def _places(walk: Walk) -> Iterator[_Place]:
    import torch

    for holder in walk.near:
        if isinstance(holder, Names):
            for name in holder.all:
                value = holder.space.get(name)
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                    yield _Place(name, value, _in_space(holder, name))
        elif isinstance(holder, CellType):
            value = _contents(holder)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                yield _Place(walk.name(value), value, _in_cell(holder))


def _in_space(holder: Names, name: str) -> Callable[[Any], object]:
    return lambda value: holder.space.__setitem__(name, value)


def _in_cell(cell: CellType) -> Callable[[Any], object]:
    return lambda value: setattr(cell, "cell_contents", value)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None
