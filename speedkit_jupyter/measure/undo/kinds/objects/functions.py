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
from speedkit_jupyter.measure.undo.kinds.code.names import Names, global_names
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

    def children(self, instance: FunctionType) -> Iterable[Any]:
        """Attributes, among them what it wraps, are another kind."""
        if is_machinerys_function(instance):
            return
        yield from instance.__closure__ or ()
        yield from instance.__defaults__ or ()
        if instance.__kwdefaults__:
            yield instance.__kwdefaults__
        if is_the_users_function(instance):
            read, bound = global_names(instance.__code__)
            yield Names(instance.__globals__, read, bound)

    def copy(self, instance: FunctionType, copies: Copies) -> tuple[Any, ...]:
        """The code too: a step may patch it."""
        return instance.__code__, instance.__defaults__, instance.__kwdefaults__

    def same(self, instance: FunctionType, memory: tuple[Any, ...]) -> bool:
        """By identity."""
        code, defaults, keywords = memory
        return (
            instance.__code__ is code
            and instance.__defaults__ is defaults
            and instance.__kwdefaults__ is keywords
        )

    def put_back(self, instance: FunctionType, memory: tuple[Any, ...]) -> None:
        """All three."""
        instance.__code__, instance.__defaults__, instance.__kwdefaults__ = memory

    def replace(self, instance: FunctionType, old: Any, new: Any) -> None:
        """A default argument."""
        values = instance.__defaults__ or ()
        instance.__defaults__ = tuple(new if value is old else value for value in values)


class Callables(Kind):
    """What leads to others and holds nothing of its own that changes."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Bound methods, descriptors of a class."""
        return cls in (
            MethodType, BuiltinFunctionType, MethodWrapperType, staticmethod, classmethod, property
        ) or issubclass(cls, functools.partialmethod)  # fmt: skip

    def children(self, instance: Any) -> Iterable[Any]:
        """The functions, and the object that one is bound to."""
        if isinstance(instance, property):
            yield from (
                function
                for function in (instance.fget, instance.fset, instance.fdel)
                if function is not None
            )
        elif isinstance(instance, staticmethod | classmethod | MethodType):
            yield instance.__func__
        owner = getattr(instance, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType):
            yield owner


class Leading(Kind):
    """Other objects of Python's own that hold some, and never others than these."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """`super()`, slices, what calls a method with arguments of its own."""
        return cls in (super, slice, operator.methodcaller)

    def children(self, instance: Any) -> Iterable[Any]:
        """As the garbage collector knows them."""
        return gc.get_referents(instance)


class Finalizers(Kind):
    """`weakref.finalize`: what it will call, unless it has done so or was told not to."""

    def recognizes(self, cls: type) -> bool:
        """Kept by the class, one entry for each."""
        return issubclass(cls, weakref.finalize)

    def children(self, instance: Any) -> Iterable[Any]:
        """The function and its arguments."""
        info = _finalizers().get(instance)
        return () if info is None else (info.func, info.args, info.kwargs or ())

    def copy(self, instance: Any, copies: Copies) -> Any:
        """The entry; None once it was called."""
        return _finalizers().get(instance)

    def same(self, instance: Any, memory: Any) -> bool:
        """By identity."""
        return _finalizers().get(instance) is memory

    def put_back(self, instance: Any, memory: Any) -> None:
        """Alive again, or not alive."""
        _finalizers()[instance] = memory
        if memory is None:
            del _finalizers()[instance]


def _finalizers() -> dict[Any, Any]:
    return weakref.finalize._registry  # type: ignore[attr-defined, no-any-return]


class Caches(Kind):
    """`lru_cache`: what it keeps can be thrown away, and not put back."""

    def recognizes(self, cls: type) -> bool:
        """functools' own, written in C."""
        return issubclass(cls, LruCache)

    def copy(self, instance: Any, copies: Copies) -> Any:
        """Counts of hits and entries."""
        return instance.cache_info()

    def same(self, instance: Any, memory: Any) -> bool:
        """Whether it was used."""
        return bool(instance.cache_info() == memory)

    def beyond(self, instance: Any) -> str:
        """A library's is the library's."""
        function = getattr(instance, "__wrapped__", None)
        own = type(function) is FunctionType and is_the_users_function(function)
        return "keeps what it was called with" if own else ""
