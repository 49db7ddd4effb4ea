"""Replace iterators with replays, so that each step draws the same elements."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from io import IOBase
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.state.handlers.base import StateHandler, attribute_dict
from speedkit_jupyter.state.handlers.names import Iterators, Names, Replay
from speedkit_jupyter.state.ownership import is_the_users_class
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.modules import same_epoch

# `copy.copy` makes independent copies of the iterators of these sources.
SOURCES: tuple[Any, ...] = ([], (), range(0), {}, "", itertools.tee(())[0])
COPYABLE = tuple(type(iter(source)) for source in SOURCES)
Holder = tuple[Any, StateHandler]


class Replayed(NamedTuple):
    """An iterator and its replay. If a step drew elements, the holders get `twin` back."""

    original: Any
    replay: Replay
    twin: Any
    holders: list[Holder]


class Replays:
    """Replays of the iterators that a walk found.

    `drawn` describes iterators that can't be replaced, for example because they are in a tuple.
    `given_again` describes iterators that the user gets back as another object after a draw.
    """

    def __init__(self, walk: Walk) -> None:
        self.drawn: list[str] = []
        self.given_again: list[str] = []
        self._found: list[Replayed] = []
        for key, holders in walk.holders.items():
            iterator = walk.found.get(key)  # None if the iterator owns a thread or process
            holders = [h for h in holders if not _is_a_spare(walk, iterator, h[0])]
            if iterator is None or not _is_drawn_from(walk, iterator, holders):
                continue
            words = f"{walk.name(iterator)} ({type(iterator).__name__})"
            if not all(_can_hold_another(walk, holder) for holder, _ in holders):
                self.drawn.append(words)
                continue
            source = twin = iterator
            if type(iterator) in COPYABLE:
                source = copy.copy(iterator)
            elif (other := same_epoch(iterator)) is not None:
                source = other
            elif not is_the_users_class(type(iterator)):  # `Attributes` restores a user's iterator
                source, twin = itertools.tee(iterator)
                self.given_again.append(words)
            self._found.append(Replayed(iterator, Replay(iterator, source), twin, holders))
        self._now: list[Any] = [one.original for one in self._found]

    def rewind(self) -> None:
        """Restart all replays, so that the next step draws the same elements."""
        for one in self._found:
            one.replay.rewind()

    def take(self) -> None:
        """Replace the iterators with their replays in all holders."""
        self._exchange([one.replay for one in self._found])

    def hand_back(self) -> None:
        """Restore each iterator. If a step drew from it, use its twin, so no element is lost."""
        self._exchange([one.twin if one.replay.drawn else one.original for one in self._found])

    def _exchange(self, new: list[Any]) -> None:
        for one, old, replacement in zip(self._found, self._now, new, strict=True):
            for holder, handler in one.holders:
                handler.replace(holder, old, replacement)
        self._now = new


def _is_drawn_from(walk: Walk, iterator: Any, holders: Sequence[Holder]) -> bool:
    """Return whether an iterator needs a replay; files and iterators inside iterators don't."""
    if issubclass(type(iterator), IOBase) or type(iterator) is Replay or not holders:
        return False
    if all(_is_an_iterator(walk, holder) for holder, _ in holders):  # the outer replays suffice
        return False
    if _is_an_iterator(walk, iterator):
        return True
    begin: Any = getattr(type(iterator), "__iter__", None)
    if is_a(begin, FunctionType) and begin.__code__.co_code != _itself.__code__.co_code:
        return False  # `__iter__` returns a new iterator, so loops start again
    return any(isinstance(holder, Names | CellType) for holder, _ in holders)


def _itself(self: Any) -> Any:
    return self


def _is_an_iterator(walk: Walk, instance: Any) -> bool:
    return any(type(handler) is Iterators for handler in walk.handlers(instance))


def _can_hold_another(walk: Walk, holder: Any) -> bool:
    """Return whether an iterator in `holder` can be replaced, unlike in a tuple."""
    owner = walk.before(holder) if isinstance(holder, dict) else None
    if owner is not None and attribute_dict(owner) is holder:
        return isinstance(owner, torch.nn.Module) or is_the_users_class(type(owner))
    return any(type(one).replace is not StateHandler.replace for one in walk.handlers(holder))


def _is_a_spare(walk: Walk, iterator: Any, holder: Any) -> bool:
    """Return whether `holder` is a dict of a DataLoader or tqdm bar that only caches `iterator`."""
    owner = walk.before(holder)
    if is_a(owner, DataLoader):
        return attribute_dict(owner) is holder
    is_a_bars = type(holder) is dict and holder.get("iterable_iterator") is iterator
    return is_a_bars and holder.get("iterable") is not iterator
