"""What lies on which object, kept outside of it: a model's __dict__, copies and files stay as ever.

It lives as long as the object. That an entry must not hold its object is for the caller to see to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Entry = TypeVar("Entry")


class _Place(NamedTuple):
    reference: weakref.ref[Any]
    entries: list[Any]


class Registry(Generic[Entry]):
    """Entries by the identity of the object that they lie on.

    When an object is gone, `ended` gets its entries.
    """

    def __init__(self, ended: Callable[[list[Entry]], None]) -> None:
        self._places: dict[int, _Place] = {}
        self._ended = ended

    def on(self, thing: object) -> list[Entry]:
        """Those that lie on the object, in the order in which they came."""
        place = self._places.get(id(thing))
        return [] if place is None else [*place.entries]

    def put(self, thing: object, entry: Entry) -> None:
        """One more, on top."""
        place = self._places.get(id(thing))
        if place is None:
            key = id(thing)
            reference = weakref.ref(thing, lambda _: self._end(key))
            place = self._places[key] = _Place(reference, [])
        place.entries.append(entry)

    def take(self, thing: object, entry: Entry) -> None:
        """Take one away, if it is there."""
        place = self._places.get(id(thing))
        if place is None:
            return
        place.entries[:] = [item for item in place.entries if item is not entry]
        if not place.entries:
            del self._places[id(thing)]

    def __iter__(self) -> Iterator[tuple[Any, Entry]]:
        """Every object with each of its entries."""
        for place in list(self._places.values()):
            thing = place.reference()
            if thing is not None:
                yield from ((thing, entry) for entry in [*place.entries])

    def _end(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._ended(place.entries)
