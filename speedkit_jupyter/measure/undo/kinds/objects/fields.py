"""What objects hold beside attributes, in fields of C that can be assigned."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterable
from types import FunctionType, MemberDescriptorType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING, Copies, Kind
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class, is_the_users_function

EXCEPTIONS = ("args", "__cause__", "__context__", "__suppress_context__", "__traceback__")
NAMES = ("__name__", "__qualname__", "__doc__", "__module__")
OF_CLASSES = ("__name__", "__qualname__", "__bases__", "__class__")
Memory = list[tuple[str, Any]]


class Fields(Kind):
    """What an exception says, what a function, a class or a property is called."""

    def recognizes(self, cls: type) -> bool:
        """Of the user's own functions and classes only, which is known of each."""
        return issubclass(cls, BaseException | type | property) or cls is FunctionType

    def children(self, instance: Any) -> Iterable[Any]:
        """Their values: an exception's arguments, annotations."""
        return [value for _, value in self.copy(instance, Copies()) if value is not MISSING]

    def copy(self, instance: Any, copies: Copies) -> Memory:
        """Read as they are, around what the class may do."""
        return [(name, _read(instance, name)) for name in _names(instance)]

    def same(self, instance: Any, memory: Memory) -> bool:
        """By identity; names that are made when they are read by value."""
        for name, value in memory:
            now = _read(instance, name)
            if now is not value and not (type(now) in {str, tuple} and now == value):
                return False
        return True

    def put_back(self, instance: Any, memory: Memory) -> None:
        """Those that are otherwise."""
        write = type.__setattr__ if isinstance(instance, type) else object.__setattr__
        for name, value in memory:
            if value is not MISSING and _read(instance, name) is not value:
                write(instance, name, value)


class Registered(Kind):
    """The classes that an abstract one of the user's was told are its own."""

    def recognizes(self, cls: type) -> bool:
        """Of Python's metaclass."""
        return issubclass(cls, abc.ABCMeta)

    def copy(self, instance: Any, copies: Copies) -> list[type]:
        """In no order."""
        return _registered(instance) if is_the_users_class(instance) else []

    def same(self, instance: Any, memory: list[type]) -> bool:
        """By identity."""
        now = self.copy(instance, Copies())
        return len(now) == len(memory) and all(cls in memory for cls in now)

    def put_back(self, instance: Any, memory: list[type]) -> None:
        """What `isinstance` has found meanwhile is asked anew."""
        _abc: Any = sys.modules["_abc"]
        _abc._reset_registry(instance)
        _abc._reset_caches(instance)
        for cls in memory:
            _abc._abc_register(instance, cls)


def _registered(cls: type) -> list[type]:
    dump = getattr(sys.modules.get("_abc"), "_get_dump", None)
    entries = [] if dump is None else [reference() for reference in dump(cls)[0]]
    return [entry for entry in entries if entry is not None]


def _names(instance: Any) -> Iterable[str]:
    if isinstance(instance, BaseException):
        return (*EXCEPTIONS, *_members(type(instance)))
    if isinstance(instance, property):
        return ("__doc__",)
    if isinstance(instance, type):
        return OF_CLASSES if is_the_users_class(instance) else ()
    if not is_the_users_function(instance):
        return ()
    return NAMES if _is_evaluated_late(instance) else (*NAMES, "__annotations__")


def _is_evaluated_late(function: Any) -> bool:
    """Whether to read a function's annotations would run code."""
    return sys.version_info >= (3, 14) and function.__annotate__ is not None


def _members(cls: type) -> list[str]:
    """What the exceptions of Python's own have beside: a number, a file, a value."""
    return [
        name
        for base in cls.__mro__
        if base.__module__ == "builtins"
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and name not in EXCEPTIONS
    ]


def _read(instance: Any, name: str) -> Any:
    read = type.__getattribute__ if isinstance(instance, type) else object.__getattribute__
    try:
        return read(instance, name)
    except AttributeError:
        return MISSING
