"""Iterators, which can't go back: what a step draws is kept, and given again."""

from __future__ import annotations

import ast
import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from inspect import GEN_CREATED, getgeneratorstate
from io import IOBase
from types import CellType, FunctionType, GeneratorType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.measure.undo.handlers.iterators import Iterators
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.measure.undo.handlers.origin import is_the_users_class
from speedkit_jupyter.measure.undo.replay import Replay, Resumed
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.lookup import is_a

# Iterators that copy.copy makes independent of one another.
SOURCES: tuple[Any, ...] = (
    [], (), range(0), "", "é", b"", bytearray(), {}, {}.values(), {}.items(), set(),
)  # fmt: skip
COPYABLE: tuple[type, ...] = (
    *{type(iter(source)) for source in SOURCES},
    type(reversed([])),
    itertools.repeat,
)
Holder = tuple[Any, StateHandler]


class Replays:
    """The iterators that a walk found, replaying their first draws wherever they are held.

    `hand_back` puts the user's into their place, `take` takes them away again. In words, `drawn`
    are those whose holder can hold no other, and `given_again` those that come back as another
    object.
    """

    def __init__(self, walk: Walk) -> None:
        self.drawn: list[str] = []
        self.given_again: list[str] = []
        self._words: dict[int, str] = {}
        self._found: list[tuple[Any, Replay, list[Holder]]] = []
        self._lent: list[tuple[Any, Any]] = []
        for key, holders in walk.holders.items():
            iterator = walk.found.get(key)  # None for one that has a thread of its own
            holders = [h for h in holders if not _is_its_loader(walk.before(h[0]), h[0])]
            if iterator is None or not _is_drawn_from(walk, iterator, holders):
                continue
            words = f"{walk.name(iterator)} ({type(iterator).__name__})"
            if not all(_can_hold_another(walk, holder) for holder, _ in holders):
                self.drawn.append(words)
                continue
            owners = [walk.before(holder) for holder, _ in holders]
            loaders = [owner for owner in owners if _is_a_loaders(owner)]
            replay = _replay(iterator, loaders)
            self._words[id(iterator)] = words
            self._found.append((iterator, replay, holders))
            if not (loaders or _comes_back(iterator, replay)):
                self.given_again.append(words)
        self._now: list[Any] = [iterator for iterator, _, _ in self._found]

    def rewind(self) -> None:
        """Let the next step draw the same again."""
        for _, replay, _ in self._found:
            replay.rewind()

    def take(self) -> None:
        """Put the replaying iterators in place."""
        self._exchange([replay for _, replay, _ in self._found])
        self._lent = []

    def hand_back(self, for_good: bool = True) -> None:
        """Put the user's iterators in place: untouched, or giving first what was drawn."""
        given = []
        for original, replay, _ in self._found:
            if _comes_back(original, replay):
                given.append(original)
            else:
                given.append(replay.as_found() if for_good else Resumed([], replay.as_found()))
        self._exchange(given)
        self._lent = [(iterator, _position(iterator)) for iterator in given]

    def driven(self) -> list[str]:
        """Return the names of generators that were sent something, or closed."""
        return [self._words[id(iterator)] for iterator, replay, _ in self._found if replay.driven]

    def used(self) -> bool:
        """Return whether anything was drawn from what was handed back for a while."""
        return any(_position(iterator) != position for iterator, position in self._lent)

    def _exchange(self, new: list[Any]) -> None:
        for (_, _, holders), old, replacement in zip(self._found, self._now, new, strict=True):
            for holder, handler in holders:
                handler.replace(holder, old, replacement)
        self._now = new


def _is_drawn_from(walk: Walk, iterator: Any, holders: Sequence[Holder]) -> bool:
    """Return whether the step draws from it; False for an object whose attributes are put back."""
    if issubclass(type(iterator), IOBase) or hasattr(type(iterator), "replays") or not holders:
        return False
    if all(_is_an_iterator(walk, holder) for holder, _ in holders):  # which is drawn from instead
        return False
    if _is_an_iterator(walk, iterator):
        return True
    begin: Any = getattr(type(iterator), "__iter__", None)
    if is_a(begin, FunctionType) and begin.__code__.co_code != Resumed.__iter__.__code__.co_code:
        return False  # a loader that each loop begins anew: its `__iter__` does not return itself
    return any(isinstance(holder, Names | CellType) for holder, _ in holders)


def _is_an_iterator(walk: Walk, instance: Any) -> bool:
    return any(type(handler) is Iterators for handler in walk.handlers(instance))


def _can_hold_another(walk: Walk, holder: Any) -> bool:
    """Return whether an iterator may be exchanged: libraries may do more than draw from theirs."""
    import torch

    if isinstance(holder, tuple | set | frozenset):
        return False
    owner = walk.before(holder) if isinstance(holder, dict) else holder
    if owner is None or attribute_dict(owner) is not holder:
        return any(handler.can_replace for handler in walk.handlers(holder))
    is_known = _is_a_loaders(owner) or isinstance(owner, torch.nn.Module)
    return is_known or is_the_users_class(type(owner))


def _is_a_loaders(iterator: Any) -> bool:
    """Return whether it is a loader's without processes: then all of it is put back."""
    from torch.utils.data import dataloader

    return is_a(iterator, dataloader._SingleProcessDataLoaderIter)


def _is_its_loader(owner: Any, holder: Any) -> bool:
    """Return whether a loader holds it to keep its workers: that begins it anew, and draws none."""
    from torch.utils.data import DataLoader

    return is_a(owner, DataLoader) and attribute_dict(owner) is holder


def _position(iterator: Any) -> Any:
    """Return something that another draw changes, as far as it shows."""
    if type(iterator) is Resumed:
        return iterator.used
    if isinstance(iterator, GeneratorType):
        return getgeneratorstate(iterator)
    return operator.length_hint(iterator, -1) if isinstance(iterator, COPYABLE) else None


def _comes_back(iterator: Any, replay: Replay) -> bool:
    """Return whether it is not drawn from, or is put back as an object with attributes."""
    return (
        not replay.draws_from(iterator)
        or _is_a_loaders(iterator)
        or is_the_users_class(type(iterator))
    )


def _replay(iterator: Any, loaders: Sequence[Any]) -> Replay:
    """Replay a copy of it that draws for itself, or else the iterator itself."""
    if type(iterator) in COPYABLE:
        return Replay(copy.copy(iterator))
    if type(iterator) is itertools.count:  # newer Pythons can't copy it; it prints where it stands
        numbers = repr(iterator)[len("count(") : -1].split(", ")
        return Replay(itertools.count(*map(ast.literal_eval, numbers)))
    if loaders:
        return Replay(_another_epoch(iterator, loaders[0]) or iterator, rewinds=False)
    return Replay(iterator)


def _another_epoch(iterator: Any, loader: Any) -> Iterator[Any] | None:
    """Return the order of an epoch as the loader's own would begin it, if that has not begun."""
    batches = loader._index_sampler
    begin = getattr(type(batches), "__iter__", None)
    has_not_begun = type(iterator) is GeneratorType and getgeneratorstate(iterator) == GEN_CREATED
    if not has_not_begun or getattr(begin, "__code__", None) is not iterator.gi_code:
        return None
    return begin(batches)  # type: ignore[misc, no-any-return]
