"""Lists, dicts, sets, queues, rows of bytes and what is derived from them."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import (
    MISSING,
    Copies,
    StateHandler,
    is_the_plans,
)


class Dicts(StateHandler):
    """Dicts of every class: keys, their order, values, a defaultdict's factory.

    A plan's own entries (its hooks, say) stay: it may have been applied anew since.
    """

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, dict)

    def children(self, instance: Any) -> Iterable[Any]:
        keys, values, factory = self.copy(instance, Copies())
        return [*keys, *values, *([] if factory is MISSING else [factory])]

    def copy(self, instance: Any, copies: Copies) -> tuple[list[Any], list[Any], Any]:
        base = _base(instance)
        factory = instance.default_factory if isinstance(instance, defaultdict) else MISSING
        return [*base.keys(instance)], [*base.values(instance)], factory

    def same(self, instance: Any, memory: tuple[list[Any], list[Any], Any]) -> bool:
        base, (keys, values, factory) = _base(instance), memory
        return (
            len(instance) == len(keys)
            and all(map(operator.is_, base.values(instance), values))
            and all(map(operator.is_, base.keys(instance), keys))
            and (factory is MISSING or instance.default_factory is factory)
        )

    def put_back(self, instance: Any, memory: tuple[list[Any], list[Any], Any]) -> None:
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

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        base = _base(instance)
        for key in [key for key, value in base.items(instance) if value is old]:
            base.__setitem__(instance, key, new)


def _base(instance: Any) -> Any:
    """Return the class whose methods do what they say: a user's class may override them."""
    return OrderedDict if isinstance(instance, OrderedDict) else dict


class Lists(StateHandler):
    """The elements of lists and deques, in order."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, list | deque)

    def children(self, instance: Any) -> Iterable[Any]:
        return _elements(instance)

    def copy(self, instance: Any, copies: Copies) -> list[Any]:
        return _elements(instance)

    def put_back(self, instance: Any, memory: list[Any]) -> None:
        if isinstance(instance, list):
            list.__setitem__(instance, slice(None), memory)
        else:
            deque.clear(instance)
            deque.extend(instance, memory)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        self.put_back(instance, [new if part is old else part for part in _elements(instance)])


def _elements(instance: Any) -> list[Any]:
    iterate = list.__iter__ if isinstance(instance, list) else deque.__iter__
    return list(iterate(instance))


class Sets(StateHandler):
    """The elements of sets, by identity, since hashes may be the user's."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, set)

    def children(self, instance: Any) -> Iterable[Any]:
        return set.copy(instance)

    def copy(self, instance: Any, copies: Copies) -> dict[int, Any]:
        return {id(element): element for element in set.__iter__(instance)}

    def put_back(self, instance: Any, memory: dict[int, Any]) -> None:
        set.clear(instance)
        set.update(instance, memory.values())
