"""Iterators, which can't go back: what a step draws is kept, and given again."""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from inspect import getgeneratorstate
from io import IOBase
from types import CellType, GeneratorType
from typing import Any

from speedkit_jupyter.measure.undo.iterator_stand_in import Lent, OfOneEpoch, Replay
from speedkit_jupyter.measure.undo.kinds.base import Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.files.streams import (
    COUNTERS,
    Iterators,
    epoch_of,
    has_not_begun,
)
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class
from speedkit_jupyter.measure.undo.loaders import (
    Epoch,
    another_epoch,
    begins_anew,
    draws_at_its_end,
    is_a_loaders,
    is_in_a_variable,
    is_its_loaders,
    is_shuffled_later,
    keeps_workers,
    loaders_behind,
)
from speedkit_jupyter.measure.undo.walk import Walk

# Iterators that copy.copy makes independent of one another.
SOURCES: tuple[Any, ...] = (
    [], (), range(0), "", "é", b"", bytearray(), {}, {}.values(), {}.items(), set(),
)  # fmt: skip
COPYABLE: tuple[type, ...] = (
    *{type(iter(source)) for source in SOURCES},
    type(reversed([])),
    itertools.repeat,
)
Holder = tuple[Any, Kind]


class Replays:
    """The iterators that a walk found, replaying their first draws wherever they are held.

    `hand_back` puts the user's into their place, `take` takes them away again. `drawn` are those
    that something holds which can hold no other, in words; `given_again` those that come back as
    another object; `not_begun` those of a loader that has yet to draw its order, where no other
    one like it can be begun; `in_an_epoch` those whose end their loader counts, which is put back.
    """

    def __init__(self, walk: Walk) -> None:
        self.drawn: list[str] = []
        self.given_again: list[str] = []
        self.not_begun: list[str] = []
        self.in_an_epoch: list[str] = []
        self._words: dict[int, str] = {}
        self._found: list[tuple[Any, Replay, list[Holder]]] = []
        self._lent: list[tuple[Any, Any]] = []
        self._epochs: list[tuple[str, Epoch, bool]] = []
        for key, holders in walk.holders.items():
            iterator = walk.found.get(key)  # None where it goes with a file, or has a thread
            if iterator is None or not _is_drawn_from(walk, iterator, holders):
                continue
            words = f"{walk.name(iterator)} ({type(iterator).__name__})"
            if keeps_workers(iterator):
                self._epochs.append((words, Epoch(iterator), is_in_a_variable(iterator)))
                holders = [holder for holder in holders if not _is_its_loaders(walk, holder[0])]
                if not holders:  # every loop over the loader begins it anew
                    continue
            if not all(_can_hold_another(walk, holder) for holder, _ in holders):
                self.drawn.append(words)
                continue
            owners = [walk.before(holder) for holder, _ in holders]
            loaders = [owner for owner in owners if is_a_loaders(owner)]
            owner = epoch_of(iterator)
            owner = None if loaders or id(owner) not in walk.found else owner
            replay = _replay(iterator, loaders, owner)
            by_itself = owner is not None and walk.before(owner) is not iterator
            if by_itself and not has_not_begun(iterator):
                self.in_an_epoch.append(walk.name(iterator))
            if loaders and draws_at_its_end(iterator):
                self.in_an_epoch.append(walk.name(loaders[0]))
            self._words[id(iterator)] = words
            self._found.append((iterator, replay, holders))
            if loaders and replay.draws_from(iterator) and is_shuffled_later(iterator, loaders[0]):
                self.not_begun.append(walk.name(loaders[0]))
            if any(
                is_shuffled_later(loader._sampler_iter, loader)
                for loader in loaders_behind(iterator)
            ):
                self.not_begun.append(walk.name(iterator))
            if isinstance(replay, OfOneEpoch) or not (loaders or _comes_back(iterator, replay)):
                self.given_again.append(words)
        self._now: list[Any] = [iterator for iterator, _, _ in self._found]

    def rewind(self) -> None:
        """The next step draws the same again."""
        for _, replay, _ in self._found:
            replay.rewind()

    def take(self) -> None:
        """Put the replaying ones in place."""
        self._exchange([replay for _, replay, _ in self._found])
        self._lent = []

    def hand_back(self, for_good: bool = True) -> None:
        """Put the user's in place: untouched, or giving first what was drawn."""
        given = []
        for original, replay, _ in self._found:
            iterator = original
            if not _comes_back(original, replay):
                iterator = replay.as_found() if for_good else Lent(replay.as_found())
            given.append(iterator)
        self._exchange(given)
        self._lent = [(iterator, _position(iterator)) for iterator in given]

    def driven(self) -> list[str]:
        """Generators that were sent something, or closed: those are left as they then were."""
        return [self._words[id(iterator)] for iterator, replay, _ in self._found if replay.driven]

    def begun_anew(self) -> list[str]:
        """Those in whose loader's place the step began another epoch, while the user was in one."""
        return [
            words
            for words, epoch, is_held in self._epochs
            if is_held and epoch.is_over and not epoch.had_ended
        ]

    def used(self) -> bool:
        """Whether one that was handed back was drawn from."""
        return any(_position(iterator) != position for iterator, position in self._lent)

    def _exchange(self, new: list[Any]) -> None:
        for (_, _, holders), old, replacement in zip(self._found, self._now, new, strict=True):
            for holder, kind in holders:
                kind.replace(holder, old, replacement)
        self._now = new


def _is_drawn_from(walk: Walk, iterator: Any, holders: Sequence[Holder]) -> bool:
    """Not so an object of a class of its own that is kept as a part of another: its attributes
    are put back.
    """
    if issubclass(type(iterator), IOBase) or hasattr(type(iterator), "replays"):
        return False
    if begins_anew(type(iterator)):
        return False  # a loader that a loop asks for more, whose attributes are put back
    if all(_is_an_iterator(walk, holder) for holder, _ in holders):  # which is drawn from instead
        return False
    if _is_an_iterator(walk, iterator):
        return True
    return any(isinstance(holder, Names | CellType) for holder, _ in holders)


def _is_an_iterator(walk: Walk, instance: Any) -> bool:
    return any(type(kind) is Iterators for kind in walk.kinds(instance))


def _can_hold_another(walk: Walk, holder: Any) -> bool:
    """A library's object may do more with an iterator of its own than draw from it."""
    if isinstance(holder, tuple | set | frozenset):
        return False
    owner = walk.before(holder) if isinstance(holder, dict) else holder
    if owner is None or attribute_dict(owner) is not holder:
        return any(kind.can_replace for kind in walk.kinds(holder))
    return is_the_users_class(type(owner)) or is_a_loaders(owner) or _is_a_module(owner)


def _position(iterator: Any) -> Any:
    """Another one after a draw, as far as it shows."""
    if type(iterator) is Lent:
        return iterator.used
    if isinstance(iterator, GeneratorType):
        return getgeneratorstate(iterator)
    return operator.length_hint(iterator, -1) if isinstance(iterator, COPYABLE) else None


def _is_its_loaders(walk: Walk, holder: Any) -> bool:
    return is_its_loaders(walk.before(holder), holder)


def _is_a_module(owner: Any) -> bool:
    import torch

    return isinstance(owner, torch.nn.Module)


def _comes_back(iterator: Any, replay: Replay) -> bool:
    """Whether it is left alone meanwhile, or put back as an object with attributes."""
    if isinstance(replay, OfOneEpoch):
        return replay.is_untouched()
    if not replay.draws_from(iterator) or is_a_loaders(iterator):
        return True
    return is_the_users_class(type(iterator))


def _replay(iterator: Any, loaders: Sequence[Any], owner: Any) -> Replay:
    """Of another one that draws for itself, where there can be one.

    `owner` is what begins epochs like this one, where it will be put back.
    """
    if type(iterator) in COPYABLE:
        return Replay(copy.copy(iterator))
    if isinstance(iterator, COUNTERS):
        return Replay(_another_counter(iterator), keeps=False)
    if loaders:
        return Replay(another_epoch(iterator, loaders[0]) or iterator, rewinds=False)
    if keeps_workers(iterator):
        return OfOneEpoch(Epoch(iterator))
    if owner is not None and has_not_begun(iterator):
        return Replay(type(owner).__iter__(owner), owner=owner)
    return Replay(iterator)


def _another_counter(counter: Any) -> Iterator[Any]:
    """Python 3.14 can't copy one; what it prints says where it stands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return copy.copy(counter)  # type: ignore[no-any-return]
    except TypeError:
        words = repr(counter)[len("count(") : -1].split(", ")
        return itertools.count(*(float(w) if "." in w or "e" in w else int(w) for w in words))
