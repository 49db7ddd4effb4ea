"""Functions and what behaves like one: closures, defaults, partial arguments, wrapped ones."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Iterable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind
from speedkit_jupyter.measure.undo.kinds.names import Names, global_names
from speedkit_jupyter.measure.undo.kinds.origin import (
    is_machinerys_function,
    is_the_users_function,
)

LruCache = type(functools.lru_cache(None)(len))


class Functions(Kind):
    """Closure, default arguments, and the globals that a function of the user's names."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """Written in Python."""
        return cls is FunctionType

    def children(self, found: FunctionType) -> Iterable[Any]:
        """Attributes, among them what it wraps, are another kind."""
        if is_machinerys_function(found):
            return
        yield from found.__closure__ or ()
        yield from found.__defaults__ or ()
        if found.__kwdefaults__:
            yield found.__kwdefaults__
        if is_the_users_function(found):
            read, bound = global_names(found.__code__)
            yield Names(found.__globals__, read, bound)

    def copy(self, found: FunctionType, copies: Copies) -> tuple[Any, ...]:
        """The code too: a step may patch it."""
        return found.__code__, found.__defaults__, found.__kwdefaults__

    def same(self, found: FunctionType, memory: tuple[Any, ...]) -> bool:
        """By identity."""
        code, defaults, keywords = memory
        return (
            found.__code__ is code
            and found.__defaults__ is defaults
            and found.__kwdefaults__ is keywords
        )

    def put_back(self, found: FunctionType, memory: tuple[Any, ...]) -> None:
        """All three."""
        found.__code__, found.__defaults__, found.__kwdefaults__ = memory

    def replace(self, found: FunctionType, old: Any, new: Any) -> None:
        """A default argument."""
        values = found.__defaults__ or ()
        found.__defaults__ = tuple(new if one is old else one for one in values)


class Callables(Kind):
    """What leads to others and holds nothing of its own that changes."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Bound methods, descriptors of a class."""
        return cls in (
            MethodType, BuiltinFunctionType, MethodWrapperType, staticmethod, classmethod, property
        ) or issubclass(cls, functools.partialmethod)  # fmt: skip

    def children(self, found: Any) -> Iterable[Any]:
        """The functions, and the object that one is bound to."""
        if isinstance(found, property):
            yield from (one for one in (found.fget, found.fset, found.fdel) if one is not None)
        elif isinstance(found, staticmethod | classmethod | MethodType):
            yield found.__func__
        owner = getattr(found, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType):
            yield owner


class Leading(Kind):
    """Other objects of Python's own that hold some, and never others than these."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """`super()`, slices, what calls a method with arguments of its own."""
        return cls in (super, slice, operator.methodcaller)

    def children(self, found: Any) -> Iterable[Any]:
        """As the garbage collector knows them."""
        return gc.get_referents(found)


class Finalizers(Kind):
    """`weakref.finalize`: what it will call, unless it has done so or was told not to."""

    def recognizes(self, cls: type) -> bool:
        """Kept by the class, one entry for each."""
        return issubclass(cls, weakref.finalize)

    def children(self, found: Any) -> Iterable[Any]:
        """The function and its arguments."""
        info = _finalizers().get(found)
        return () if info is None else (info.func, info.args, info.kwargs or ())

    def copy(self, found: Any, copies: Copies) -> Any:
        """The entry; None once it was called."""
        return _finalizers().get(found)

    def same(self, found: Any, memory: Any) -> bool:
        """By identity."""
        return _finalizers().get(found) is memory

    def put_back(self, found: Any, memory: Any) -> None:
        """Alive again, or not alive."""
        _finalizers()[found] = memory
        if memory is None:
            del _finalizers()[found]


def _finalizers() -> dict[Any, Any]:
    return weakref.finalize._registry  # type: ignore[attr-defined, no-any-return]


class Caches(Kind):
    """`lru_cache`: what it keeps can be thrown away, and not put back."""

    def recognizes(self, cls: type) -> bool:
        """functools' own, written in C."""
        return issubclass(cls, LruCache)

    def copy(self, found: Any, copies: Copies) -> Any:
        """Counts of hits and entries."""
        return found.cache_info()

    def same(self, found: Any, memory: Any) -> bool:
        """Whether it was used."""
        return bool(found.cache_info() == memory)

    def beyond(self, found: Any) -> str:
        """A library's is the library's."""
        function = getattr(found, "__wrapped__", None)
        own = type(function) is FunctionType and is_the_users_function(function)
        return "keeps what it was called with" if own else ""
