"""Lists, dicts, sets, queues and what is derived from them."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import MISSING, Copies, Holder, StateHandler
from speedkit_jupyter.measure.undo.handlers.iterators import Replay
from speedkit_jupyter.measure.undo.ownership import PACKAGE

Items = tuple[list[Any], list[Any], Any]


class Dicts(StateHandler):
    """Dicts of every class: keys, their order, values, a defaultdict's factory.

    A plan's own entries (its hooks, say) stay: it may have been applied anew since.
    """

    types = (dict,)
    can_replace = True

    def children(self, instance: Any) -> Iterable[Any]:
        keys, values, factory = self.copy(instance, Copies())
        return [*keys, *values, *([] if factory is MISSING else [factory])]

    def copy(self, instance: Any, copies: Copies) -> Items:
        base = _base(instance)
        factory = instance.default_factory if isinstance(instance, defaultdict) else MISSING
        return [*base.keys(instance)], [*base.values(instance)], factory

    def same(self, instance: Any, memory: Items) -> bool:
        keys, values, factory = self.copy(instance, Copies())
        return (
            len(keys) == len(memory[0])
            and all(map(operator.is_, values, memory[1]))
            and all(map(operator.is_, keys, memory[0]))
            and factory is memory[2]
        )

    def put_back(self, instance: Any, memory: Items) -> None:
        base, (keys, values, factory) = _base(instance), memory
        of_a_plan = [pair for pair in base.items(instance) if _is_a_plans(pair[1])]
        base.clear(instance)
        for key, value in zip(keys, values, strict=True):
            if not _is_a_plans(value):
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


def _is_a_plans(value: Any) -> bool:
    """Return whether a plan of ours made this value: a hook or a patched call, say."""
    function = value.__func__ if type(value) is MethodType else value
    for _ in range(4):
        if type(function) is not FunctionType:
            break
        if function.__globals__.get("__name__", "").partition(".")[0] == PACKAGE:
            return True
        function = vars(function).get("__wrapped__")
    home = str(getattr(type(value), "__module__", ""))
    return home.partition(".")[0] == PACKAGE and type(value) is not Replay


class Lists(Holder):
    """The elements of lists and deques, in order."""

    types = (list, deque)
    can_replace = True

    def copy(self, instance: Any, copies: Copies) -> list[Any]:
        iterate = list.__iter__ if isinstance(instance, list) else deque.__iter__
        return list(iterate(instance))

    def put_back(self, instance: Any, memory: list[Any]) -> None:
        if isinstance(instance, list):
            list.__setitem__(instance, slice(None), memory)
        else:
            deque.clear(instance)
            deque.extend(instance, memory)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        parts = self.copy(instance, Copies())
        self.put_back(instance, [new if part is old else part for part in parts])


class Sets(Holder):
    """The elements of sets, by identity, since hashes may be the user's."""

    types = (set,)

    def copy(self, instance: Any, copies: Copies) -> dict[int, Any]:
        return {id(element): element for element in set.__iter__(instance)}

    def put_back(self, instance: Any, memory: dict[int, Any]) -> None:
        set.clear(instance)
        set.update(instance, memory.values())
