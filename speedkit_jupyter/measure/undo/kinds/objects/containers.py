"""Lists, dicts, sets, queues and what is derived from them, by their elements' identity."""

from __future__ import annotations

import array
import gc
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, MappingView
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

    def children(self, instance: Any) -> Iterable[Any]:
        """Keys as well: they may be objects; and what a defaultdict calls."""
        base = _base(instance)
        factory = [instance.default_factory] if isinstance(instance, defaultdict) else []
        return [*base.keys(instance), *base.values(instance), *factory]

    def copy(self, instance: Any, copies: Copies) -> tuple[list[Any], list[Any], Any]:
        """Keys and values in order."""
        base = _base(instance)
        factory = instance.default_factory if isinstance(instance, defaultdict) else MISSING
        return [*base.keys(instance)], [*base.values(instance)], factory

    def same(self, instance: Any, memory: tuple[list[Any], list[Any], Any]) -> bool:
        """By identity, in order."""
        base, (keys, values, factory) = _base(instance), memory
        return (
            len(instance) == len(keys)
            and all(map(operator.is_, base.values(instance), values))
            and all(map(operator.is_, base.keys(instance), keys))
            and (factory is MISSING or instance.default_factory is factory)
        )

    def put_back(self, instance: Any, memory: tuple[list[Any], list[Any], Any]) -> None:
        """Around methods of the user's class."""
        base, (keys, values, factory) = _base(instance), memory
        of_a_plan = [pair for pair in base.items(instance) if is_the_plans(pair[1])]
        base.clear(instance)
        for key, value in zip(keys, values, strict=True):
            if not is_the_plans(value):
                base.__setitem__(instance, key, value)
        for key, value in of_a_plan:
            base.__setitem__(instance, key, value)
        if factory is not MISSING:
            instance.default_factory = factory

    def put_back_around(self, instance: Any, memory: Any, theirs: Collection[Any]) -> None:
        """All but the keys that another thread writes."""
        base, (keys, values, _) = _base(instance), memory
        saved = dict(zip(keys, values, strict=True))
        for key in [key for key in base.keys(instance) if key not in saved and key not in theirs]:
            if not is_the_plans(base.__getitem__(instance, key)):
                base.pop(instance, key, None)
        for key, value in saved.items():
            if key not in theirs and not is_the_plans(value):
                base.__setitem__(instance, key, value)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """A value; a key stays."""
        base = _base(instance)
        keys = [key for key, value in base.items(instance) if value is old]
        for key in keys:
            base.__setitem__(instance, key, new)


def _base(instance: Any) -> Any:
    """Whose methods do what they say: a user's class may have its own."""
    return OrderedDict if isinstance(instance, OrderedDict) else dict


class Lists(Kind):
    """Lists and queues: which elements, in which order."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """A list or a deque or derived from one."""
        return issubclass(cls, list | deque)

    def children(self, instance: Any) -> Iterable[Any]:
        """The elements."""
        return _elements(instance)

    def copy(self, instance: Any, copies: Copies) -> list[Any]:
        """The elements."""
        return _elements(instance)

    def same(self, instance: Any, memory: list[Any]) -> bool:
        """By identity."""
        return len(instance) == len(memory) and all(map(operator.is_, _elements(instance), memory))

    def put_back(self, instance: Any, memory: list[Any]) -> None:
        """Around methods of the user's class."""
        if isinstance(instance, list):
            list.__setitem__(instance, slice(None), memory)
        else:
            deque.clear(instance)
            deque.extend(instance, memory)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """Every place that has it."""
        self.put_back(
            instance, [new if element is old else element for element in _elements(instance)]
        )


def _elements(instance: Any) -> list[Any]:
    iterate = list.__iter__ if isinstance(instance, list) else deque.__iter__
    return list(iterate(instance))


class Sets(Kind):
    """Sets: which elements."""

    def recognizes(self, cls: type) -> bool:
        """A set that can change, or derived from it."""
        return issubclass(cls, set)

    def children(self, instance: Any) -> Iterable[Any]:
        """The elements."""
        return set.copy(instance)

    def copy(self, instance: Any, copies: Copies) -> dict[int, Any]:
        """By identity, since hashes may be the user's."""
        return {id(element): element for element in set.__iter__(instance)}

    def same(self, instance: Any, memory: dict[int, Any]) -> bool:
        """The same objects."""
        return len(instance) == len(memory) and all(
            id(element) in memory for element in set.__iter__(instance)
        )

    def put_back(self, instance: Any, memory: dict[int, Any]) -> None:
        """Around methods of the user's class."""
        set.clear(instance)
        set.update(instance, memory.values())


class Immutables(Kind):
    """What can't change itself but holds what can."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Tuples, named ones too, frozen sets, views of a dict."""
        return issubclass(cls, tuple | frozenset | MappingView) or cls is MappingProxyType

    def children(self, instance: Any) -> Iterable[Any]:
        """The elements, or the dict behind a view."""
        if isinstance(instance, tuple):
            return tuple.__iter__(instance)
        if isinstance(instance, frozenset):
            return frozenset.__iter__(instance)
        behind = gc.get_referents(instance)
        return [cls for referent in behind for cls in _class_of(referent)] or behind


def _class_of(behind: Any) -> list[type]:
    """The class whose attributes a dict is, which can't be written as a dict."""
    own = behind.get("__dict__") if type(behind) is dict else None
    return [own.__objclass__] if isinstance(own, GetSetDescriptorType) else []


class Buffers(Kind):
    """Numbers and bytes in a row: `bytearray`, `array.array`."""

    def recognizes(self, cls: type) -> bool:
        """Those of Python's own."""
        return issubclass(cls, bytearray | array.array)

    def copy(self, instance: Any, copies: Copies) -> Any:
        """The values."""
        return instance[:] if copies.fits(instance, len(memoryview(instance).tobytes())) else None

    def same(self, instance: Any, memory: Any) -> bool:
        """Bit by bit."""
        return memory is None or bytes(memoryview(instance)) == bytes(memoryview(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        """In place; raises BufferError where it is another size and a view of it is in use."""
        if len(instance) == len(memory):
            memoryview(instance).cast("B")[:] = memoryview(memory).cast("B")
        else:
            instance[:] = memory
