"""The iterators of a step: what it draws is given again, to it and afterwards to the user."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from inspect import GEN_CREATED, getgeneratorstate
from io import IOBase
from types import CellType, FunctionType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.state.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.state.handlers.iterators import Iterators, Replay
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.state.ownership import is_the_users_class
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.modules import batch_indices, draws_by_index, set_batch_indices

# Iterators that copy.copy makes independent of one another.
SOURCES: tuple[Any, ...] = (
    [], (), range(0), "", "é", b"", bytearray(), {}, {}.values(), {}.items(), set(),
)  # fmt: skip
COPYABLE: tuple[type, ...] = (
    *{type(iter(source)) for source in SOURCES},
    type(reversed([])),
    type(itertools.tee(())[0]),
    itertools.repeat,
)
Holder = tuple[Any, StateHandler]


class Replayed(NamedTuple):
    """An iterator, what replays it, what gives the user the same, and who holds it."""

    original: Any
    replay: Replay
    twin: Any
    holders: list[Holder]


class Replays:
    """The iterators that a walk found, replaying their first draws wherever they are held.

    In words, `drawn` are those whose holder can hold no other, and `given_again` those that may
    come back as another object.
    """

    def __init__(self, walk: Walk) -> None:
        self.drawn: list[str] = []
        self.given_again: list[str] = []
        self._found: list[Replayed] = []
        for key, holders in walk.holders.items():
            iterator = walk.found.get(key)  # None for one that has a thread of its own
            holders = [h for h in holders if not _is_its_loader(walk.before(h[0]), h[0])]
            if iterator is None or _is_a_bars_spare(iterator, holders):
                continue
            if not _is_drawn_from(walk, iterator, holders):
                continue
            words = f"{walk.name(iterator)} ({type(iterator).__name__})"
            if not all(_can_hold_another(walk, holder) for holder, _ in holders):
                self.drawn.append(words)
                continue
            source, twin = _twins(iterator)
            self._found.append(Replayed(iterator, Replay(iterator, source), twin, holders))
            if twin is not iterator:
                self.given_again.append(words)
        self._now: list[Any] = [one.original for one in self._found]

    def rewind(self) -> None:
        """Let the next step draw the same again."""
        for one in self._found:
            one.replay.rewind()

    def take(self) -> None:
        """Put the replaying iterators in place."""
        self._exchange([one.replay for one in self._found])

    def hand_back(self) -> None:
        """Put the user's iterators in place, which go on as if no step had drawn."""
        self._exchange([one.twin if one.replay.drawn else one.original for one in self._found])

    def _exchange(self, new: list[Any]) -> None:
        for one, old, replacement in zip(self._found, self._now, new, strict=True):
            for holder, handler in one.holders:
                handler.replace(holder, old, replacement)
        self._now = new


def _twins(iterator: Any) -> tuple[Iterator[Any], Any]:
    """Return an iterator to draw from, and one that gives the same: itself where that can be."""
    if is_the_users_class(type(iterator)):  # its attributes are put back
        return iterator, iterator
    if type(iterator) in COPYABLE:
        return copy.copy(iterator), iterator
    if draws_by_index(iterator):
        return _another_epoch(iterator), iterator
    first, second = itertools.tee(iterator)
    return first, second


def _another_epoch(iterator: Any) -> Iterator[Any]:
    """Return an iterator of the same loader that draws the same batches by itself."""
    other = object.__new__(type(iterator))  # torch's can't be copied
    vars(other).update(vars(iterator))
    order, batches = batch_indices(iterator)
    begin = getattr(type(batches), "__iter__", None)
    has_not_begun = type(order) is GeneratorType and getgeneratorstate(order) == GEN_CREATED
    if has_not_begun and getattr(begin, "__code__", None) is order.gi_code:  # not drawn yet
        set_batch_indices(other, iter(batches))
    elif type(order) in COPYABLE:
        set_batch_indices(other, copy.copy(order))
    else:
        for one, indices in zip((iterator, other), itertools.tee(order), strict=True):
            set_batch_indices(one, indices)
    return other  # type: ignore[no-any-return]


def _is_drawn_from(walk: Walk, iterator: Any, holders: Sequence[Holder]) -> bool:
    """Return whether the step draws from it; False for an object whose attributes are put back."""
    if issubclass(type(iterator), IOBase) or type(iterator) is Replay or not holders:
        return False
    if all(_is_an_iterator(walk, holder) for holder, _ in holders):  # which is drawn from instead
        return False
    if _is_an_iterator(walk, iterator):
        return True
    begin: Any = getattr(type(iterator), "__iter__", None)
    if is_a(begin, FunctionType) and begin.__code__.co_code != _itself.__code__.co_code:
        return False  # a loader that each loop begins anew: its `__iter__` does not return itself
    return any(isinstance(holder, Names | CellType) for holder, _ in holders)


def _is_a_bars_spare(iterator: Any, holders: Sequence[Holder]) -> bool:
    """Return whether a bar of tqdm's has it for `async for`: another loop begins a new one."""
    bars = [holder for holder, _ in holders if type(holder) is dict]
    return any(
        one.get("iterable_iterator") is iterator and one.get("iterable") is not iterator
        for one in bars
    )


def _itself(self: Any) -> Any:
    return self


def _is_an_iterator(walk: Walk, instance: Any) -> bool:
    return any(type(handler) is Iterators for handler in walk.handlers(instance))


def _can_hold_another(walk: Walk, holder: Any) -> bool:
    """Return whether an iterator may be exchanged: libraries may do more than draw from theirs."""
    owner = walk.before(holder) if isinstance(holder, dict) else None
    if owner is not None and attribute_dict(owner) is holder:
        return isinstance(owner, torch.nn.Module) or is_the_users_class(type(owner))
    return any(type(one).replace is not StateHandler.replace for one in walk.handlers(holder))


def _is_its_loader(owner: Any, holder: Any) -> bool:
    """Return whether a loader holds it to keep its workers: that begins it anew, and draws none."""
    return is_a(owner, DataLoader) and attribute_dict(owner) is holder
