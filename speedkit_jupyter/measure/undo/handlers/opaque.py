"""Objects that can't be copied, because a library keeps their state in C or elsewhere."""

from __future__ import annotations

import functools
import threading
from itertools import islice
from multiprocessing.process import BaseProcess
from types import AsyncGeneratorType, CoroutineType, FunctionType, MemberDescriptorType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler
from speedkit_jupyter.measure.undo.handlers.origin import is_the_users_function

LruCache = type(functools.lru_cache(None)(len))
# Modules of objects that have another end, in another thread or process.
CHANNELS = (
    "concurrent.futures", "multiprocessing.queues", "multiprocessing.managers",
    "multiprocessing.connection", "multiprocessing.pool", "subprocess",
)  # fmt: skip
POINTER_BYTES = object.__basicsize__ // 2
# The first elements of a list of workers tell what it is.
LOOKED_AT = 8


class Unknown(StateHandler):
    """What no other handler recognizes and is no plain value."""

    def recognizes(self, cls: type) -> bool:
        """Return whether it may change: a class that hashes by value does not."""
        own: Any = cls.__hash__
        return cls is not object and (own is None or own is object.__hash__)

    def is_unrestorable(self, instance: Any) -> bool:
        return True


class Caches(StateHandler):
    """`lru_cache`, whose entries can be cleared, and not put back. A library's is its own."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, LruCache)

    def copy(self, instance: Any, copies: Copies) -> Any:
        return instance.cache_info()

    def is_unrestorable(self, instance: Any) -> bool:
        function = getattr(instance, "__wrapped__", None)
        return type(function) is FunctionType and is_the_users_function(function)


def hides_memory(cls: type) -> bool:
    """Return whether an instance takes more bytes than its dictionary and slots do."""
    slots = sum(
        isinstance(slot, MemberDescriptorType)
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for slot in vars(base).values()
    )
    pointers = slots + (cls.__weakrefoffset__ > 0) + (cls.__dictoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + pointers * POINTER_BYTES


def is_elsewhere(cls: type) -> bool:
    """Return whether its state lies partly in another thread or process."""
    if cls in (CoroutineType, AsyncGeneratorType) or issubclass(cls, BaseProcess):
        return True
    return str(cls.__module__).startswith(CHANNELS)


def works_elsewhere(attributes: dict[str, Any]) -> bool:
    """Return whether an object with these attributes has a thread or process of its own.

    To put back the part that lies here would part the two: a loader that is set back to a smaller
    count waits for an answer that came long ago.
    """
    parts: list[Any] = []
    for value in list(attributes.values()):
        parts.append(value)
        if type(value) in (list, tuple):
            parts += islice(value, LOOKED_AT)
    return any(issubclass(type(p), threading.Thread) or is_elsewhere(type(p)) for p in parts)
