"""Iterators of torch's loaders: when they draw their order, and whose workers are kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import attribute_dict
from speedkit_jupyter.measure.undo.kinds.files.streams import KEPT_IN_C, epoch_of, has_not_begun
from speedkit_jupyter.support.lookup import is_a


def is_a_loaders(iterator: Any) -> bool:
    """Whether it has no processes: then all of it is put back."""
    from torch.utils.data import dataloader

    return is_a(iterator, dataloader._SingleProcessDataLoaderIter)


def is_shuffled_later(iterator: Any, loader: Any) -> bool:
    """Whether the order of the loader's epoch is drawn at its first batch.

    The random numbers that the draw takes are put back, and the user's own first batch is given
    again: so the next epoch begins from other ones.
    """
    from torch.utils.data import SequentialSampler

    batches = loader._index_sampler
    return has_not_begun(iterator) and not is_a(
        getattr(batches, "sampler", batches), SequentialSampler
    )


def draws_at_its_end(iterator: Any) -> bool:
    """Whether it is the order of an epoch that has begun, by a generator of the user's: torch's
    samplers draw from it once more when the epoch ends.
    """
    batches = epoch_of(iterator)
    sampler = getattr(batches, "sampler", batches)
    return getattr(sampler, "generator", None) is not None and not has_not_begun(iterator)


def loaders_behind(iterator: Any, depth: int = 4) -> Iterator[Any]:
    """The loaders' iterators that one of Python's own, a `zip` say, draws from."""
    if depth and type(iterator).__module__ in KEPT_IN_C and type(iterator) is not GeneratorType:
        for source in gc.get_referents(iterator):
            if is_a_loaders(source):
                yield source
            elif is_a(source, Iterator):
                yield from loaders_behind(source, depth - 1)
            elif type(source) is tuple:  # of zip and map
                yield from (iterator for iterator in source if is_a_loaders(iterator))


def another_epoch(iterator: Any, loader: Any) -> Iterator[Any] | None:
    """One that begins as the loader's own would, where making it runs no code of the sampler's."""
    batches = loader._index_sampler
    begin = getattr(type(batches), "__iter__", None)
    if not has_not_begun(iterator) or getattr(begin, "__code__", None) is not iterator.gi_code:
        return None
    return begin(batches)  # type: ignore[misc, no-any-return]


class Epoch:
    """One epoch of an iterator: that of a loader that keeps its workers begins anew in place.

    Then `iter(loader)` gives the iterator that there already is, set back to its start.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._order = getattr(iterator, "_sampler_iter", None)
        self.had_ended = _has_ended(iterator)

    @property
    def is_over(self) -> bool:
        """Whether another one was begun since."""
        return getattr(self.iterator, "_sampler_iter", None) is not self._order

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        return next(self.iterator)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "iterator":
            raise AttributeError(name)
        return getattr(self.iterator, name)


def begins_anew(cls: type) -> bool:
    """Whether an iterator is set back by a loop over it, and not only handed out by `iter()`."""
    begin: Any = getattr(cls, "__iter__", None)
    same = Epoch.__iter__.__code__.co_code
    return is_a(begin, FunctionType) and begin.__code__.co_code != same


def keeps_workers(iterator: Any) -> bool:
    """Whether its loader begins each epoch with this same iterator."""
    from torch.utils.data import dataloader

    if is_a(iterator, dataloader._MultiProcessingDataLoaderIter):
        return bool(iterator._persistent_workers)
    return hasattr(type(iterator), "keeps_workers")


def is_its_loaders(owner: Any, holder: Any) -> bool:
    """Whether what holds an iterator is the loader, which sets it back and draws nothing."""
    from torch.utils.data import DataLoader

    return is_a(owner, DataLoader) and attribute_dict(owner) is holder


def is_in_a_variable(iterator: Any) -> bool:
    """Whether a module, a function or a generator holds it by a name."""
    for holder in gc.get_referrers(iterator):
        if is_a(holder, CellType | FrameType | GeneratorType):
            return True
        if is_a(holder, dict) and "__name__" in holder:
            return True
    return False


def _has_ended(iterator: Any) -> bool:
    """Whether all that its workers were asked for was given out."""
    sent, received = (getattr(iterator, name, None) for name in ("_send_idx", "_rcvd_idx"))
    return sent is not None and sent == received
