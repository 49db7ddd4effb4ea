"""Instances of any class, with a dictionary or slots, and the user's own classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING, Copies, Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class

# What a class has beside what its body says.
OF_EVERY_CLASS = frozenset(
    [
        "__dict__", "__weakref__", "_abc_impl", "__annotate__", "__annotations_cache__",
        "__slots__", "__static_attributes__", "__firstlineno__", "__parameters__",
        "__orig_bases__", "__type_params__",
    ]
)  # fmt: skip


class Attributes(Kind):
    """The dictionary of an instance, which is a dict like others; here it is that it is this one.

    That of a list's subclass, a tensor, a function and a module, too.
    """

    knows_memory = False

    def recognizes(self, cls: type) -> bool:
        """Whatever has one."""
        return cls.__dictoffset__ != 0 and not issubclass(cls, type | ModuleType)

    def children(self, found: Any) -> Iterable[Any]:
        """The dictionary."""
        attributes = attribute_dict(found)
        return () if attributes is None else (attributes,)

    def copy(self, found: Any, copies: Copies) -> tuple[type, dict[str, Any] | None]:
        """The class, which may be assigned, and the dictionary itself."""
        return type(found), attribute_dict(found)

    def same(self, found: Any, memory: tuple[type, dict[str, Any] | None]) -> bool:
        """By identity."""
        cls, attributes = memory
        return type(found) is cls and attribute_dict(found) is attributes

    def put_back(self, found: Any, memory: tuple[type, dict[str, Any] | None]) -> None:
        """It may have been exchanged as a whole."""
        cls, attributes = memory
        if type(found) is not cls:
            object.__setattr__(found, "__class__", cls)
        if attribute_dict(found) is not attributes:
            object.__setattr__(found, "__dict__", attributes)


class Slots(Kind):
    """Attributes without a dictionary."""

    can_replace = True
    knows_memory = False

    def recognizes(self, cls: type) -> bool:
        """Classes that name some, be it none."""
        return not issubclass(cls, type) and any("__slots__" in one.__dict__ for one in cls.__mro__)

    def children(self, found: Any) -> Iterable[Any]:
        """Their values."""
        values = (_value(slot, found) for slot in _slots(type(found)))
        return [one for one in values if one is not MISSING]

    def copy(self, found: Any, copies: Copies) -> list[tuple[Any, Any]]:
        """Those that have no value, too."""
        return [(slot, _value(slot, found)) for slot in _slots(type(found))]

    def same(self, found: Any, memory: list[tuple[Any, Any]]) -> bool:
        """By identity."""
        return all(_value(slot, found) is one for slot, one in memory)

    def put_back(self, found: Any, memory: list[tuple[Any, Any]]) -> None:
        """Around a class's own `__setattr__`, which frozen ones refuse."""
        for slot, one in memory:
            if one is not MISSING:
                slot.__set__(found, one)
            elif _value(slot, found) is not MISSING:
                slot.__delete__(found)

    def replace(self, found: Any, old: Any, new: Any) -> None:
        """The value of a slot."""
        slots = [slot for slot in _slots(type(found)) if _value(slot, found) is old]
        for slot in slots:
            slot.__set__(found, new)


def _slots(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if "__slots__" in base.__dict__:
            yield from (
                one for one in base.__dict__.values() if isinstance(one, MemberDescriptorType)
            )


def _value(slot: Any, found: Any) -> Any:
    try:
        return slot.__get__(found)
    except AttributeError:
        return MISSING


class Classes(Kind):
    """The attributes of the user's own classes; methods lead to what they name."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """Classes, whatever their metaclass."""
        return issubclass(cls, type)

    def children(self, found: type) -> Iterable[Any]:
        """The attributes, and the classes that it is derived from."""
        if is_the_users_class(found):
            yield from _own(found).values()
            yield from found.__bases__

    def copy(self, found: type, copies: Copies) -> dict[str, Any] | None:
        """Nothing of a library's."""
        return _own(found) if is_the_users_class(found) else None

    def same(self, found: type, memory: dict[str, Any] | None) -> bool:
        """By identity."""
        if memory is None:
            return True
        now = _own(found)
        return len(now) == len(memory) and all(
            now.get(name, MISSING) is one for name, one in memory.items()
        )

    def put_back(self, found: type, memory: dict[str, Any] | None) -> None:
        """Around a metaclass's own `__setattr__`."""
        saved, now = memory or {}, _own(found)
        for name in now.keys() - saved.keys():
            type.__delattr__(found, name)
        for name, one in saved.items():
            if now.get(name, MISSING) is not one:
                type.__setattr__(found, name, one)

    def replace(self, found: type, old: Any, new: Any) -> None:
        """A class attribute."""
        names = [name for name, one in _own(found).items() if one is old]
        for name in names:
            type.__setattr__(found, name, new)


def _own(cls: type) -> dict[str, Any]:
    attributes: MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return {
        name: one
        for name, one in attributes.items()
        if name not in OF_EVERY_CLASS and not isinstance(one, MemberDescriptorType)
    }
