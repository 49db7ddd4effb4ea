"""Lists, dicts, sets, queues and what is derived from them, by their elements' identity."""

from __future__ import annotations

import array
import gc
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, MappingView
from types import GetSetDescriptorType, MappingProxyType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING, Copies, Kind, is_the_plans


class Dicts(Kind):
    """Dicts of every class: keys, their order, values, a defaultdict's factory.

    What a plan has put in (its hooks, say) is the plan's, which may have been applied anew since.
    """

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """A dict or derived from it."""
        return issubclass(cls, dict)

    def children(self, found: Any) -> Iterable[Any]:
        """Keys as well: they may be objects; and what a defaultdict calls."""
        base = _base(found)
        factory = [found.default_factory] if isinstance(found, defaultdict) else []
        return [*base.keys(found), *base.values(found), *factory]

    def copy(self, found: Any, copies: Copies) -> tuple[list[Any], list[Any], Any]:
        """Keys and values in order."""
        base = _base(found)
        factory = found.default_factory if isinstance(found, defaultdict) else MISSING
        return [*base.keys(found)], [*base.values(found)], factory

    def same(self, found: Any, memory: tuple[list[Any], list[Any], Any]) -> bool:
        """By identity, in order."""
        base, (keys, values, factory) = _base(found), memory
        return (
            len(found) == len(keys)
            and all(map(operator.is_, base.values(found), values))
            and all(map(operator.is_, base.keys(found), keys))
            and (factory is MISSING or found.default_factory is factory)
        )

    def put_back(self, found: Any, memory: tuple[list[Any], list[Any], Any]) -> None:
        """Around methods of the user's class."""
        base, (keys, values, factory) = _base(found), memory
        of_a_plan = [pair for pair in base.items(found) if is_the_plans(pair[1])]
        base.clear(found)
        for key, value in zip(keys, values, strict=True):
            if not is_the_plans(value):
                base.__setitem__(found, key, value)
        for key, value in of_a_plan:
            base.__setitem__(found, key, value)
        if factory is not MISSING:
            found.default_factory = factory

    def replace(self, found: Any, old: Any, new: Any) -> None:
        """A value; a key stays."""
        base = _base(found)
        keys = [key for key, value in base.items(found) if value is old]
        for key in keys:
            base.__setitem__(found, key, new)


def _base(found: Any) -> Any:
    """Whose methods do what they say: a user's class may have its own."""
    return OrderedDict if isinstance(found, OrderedDict) else dict


class Lists(Kind):
    """Lists and queues: which elements, in which order."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """A list or a deque or derived from one."""
        return issubclass(cls, list | deque)

    def children(self, found: Any) -> Iterable[Any]:
        """The elements."""
        return _elements(found)

    def copy(self, found: Any, copies: Copies) -> list[Any]:
        """The elements."""
        return _elements(found)

    def same(self, found: Any, memory: list[Any]) -> bool:
        """By identity."""
        return len(found) == len(memory) and all(map(operator.is_, _elements(found), memory))

    def put_back(self, found: Any, memory: list[Any]) -> None:
        """Around methods of the user's class."""
        if isinstance(found, list):
            list.__setitem__(found, slice(None), memory)
        else:
            deque.clear(found)
            deque.extend(found, memory)

    def replace(self, found: Any, old: Any, new: Any) -> None:
        """Every place that has it."""
        self.put_back(found, [new if one is old else one for one in _elements(found)])


def _elements(found: Any) -> list[Any]:
    iterate = list.__iter__ if isinstance(found, list) else deque.__iter__
    return list(iterate(found))


class Sets(Kind):
    """Sets: which elements."""

    def recognizes(self, cls: type) -> bool:
        """A set that can change, or derived from it."""
        return issubclass(cls, set)

    def children(self, found: Any) -> Iterable[Any]:
        """The elements."""
        return set.copy(found)

    def copy(self, found: Any, copies: Copies) -> dict[int, Any]:
        """By identity, since hashes may be the user's."""
        return {id(one): one for one in set.__iter__(found)}

    def same(self, found: Any, memory: dict[int, Any]) -> bool:
        """The same objects."""
        return len(found) == len(memory) and all(id(one) in memory for one in set.__iter__(found))

    def put_back(self, found: Any, memory: dict[int, Any]) -> None:
        """Around methods of the user's class."""
        set.clear(found)
        set.update(found, memory.values())


class Immutables(Kind):
    """What can't change itself but holds what can."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Tuples, named ones too, frozen sets, views of a dict."""
        return issubclass(cls, tuple | frozenset | MappingView) or cls is MappingProxyType

    def children(self, found: Any) -> Iterable[Any]:
        """The elements, or the dict behind a view."""
        if isinstance(found, tuple):
            return tuple.__iter__(found)
        if isinstance(found, frozenset):
            return frozenset.__iter__(found)
        behind = gc.get_referents(found)
        return [cls for one in behind for cls in _class_of(one)] or behind


def _class_of(behind: Any) -> list[type]:
    """The class whose attributes a dict is, which can't be written as a dict."""
    own = behind.get("__dict__") if type(behind) is dict else None
    return [own.__objclass__] if isinstance(own, GetSetDescriptorType) else []


class Buffers(Kind):
    """Numbers and bytes in a row: `bytearray`, `array.array`."""

    def recognizes(self, cls: type) -> bool:
        """Those of Python's own."""
        return issubclass(cls, bytearray | array.array)

    def copy(self, found: Any, copies: Copies) -> Any:
        """The values."""
        return found[:] if copies.fits(found, len(memoryview(found).tobytes())) else None

    def same(self, found: Any, memory: Any) -> bool:
        """Bit by bit."""
        return memory is None or bytes(memoryview(found)) == bytes(memoryview(memory))

    def put_back(self, found: Any, memory: Any) -> None:
        """In place; raises BufferError where it is another size and a view of it is in use."""
        if len(found) == len(memory):
            memoryview(found).cast("B")[:] = memoryview(memory).cast("B")
        else:
            found[:] = memory
