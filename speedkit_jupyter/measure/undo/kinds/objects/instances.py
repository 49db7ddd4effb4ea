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

    def children(self, instance: Any) -> Iterable[Any]:
        """The dictionary."""
        attributes = attribute_dict(instance)
        return () if attributes is None else (attributes,)

    def copy(self, instance: Any, copies: Copies) -> tuple[type, dict[str, Any] | None]:
        """The class, which may be assigned, and the dictionary itself."""
        return type(instance), attribute_dict(instance)

    def same(self, instance: Any, memory: tuple[type, dict[str, Any] | None]) -> bool:
        """By identity."""
        cls, attributes = memory
        return type(instance) is cls and attribute_dict(instance) is attributes

    def put_back(self, instance: Any, memory: tuple[type, dict[str, Any] | None]) -> None:
        """It may have been exchanged as a whole."""
        cls, attributes = memory
        if type(instance) is not cls:
            object.__setattr__(instance, "__class__", cls)
        if attribute_dict(instance) is not attributes:
            object.__setattr__(instance, "__dict__", attributes)


class Slots(Kind):
    """Attributes without a dictionary."""

    can_replace = True
    knows_memory = False

    def recognizes(self, cls: type) -> bool:
        """Classes that name some, be it none."""
        return not issubclass(cls, type) and any(
            "__slots__" in base.__dict__ for base in cls.__mro__
        )

    def children(self, instance: Any) -> Iterable[Any]:
        """Their values."""
        values = (_value(slot, instance) for slot in _slots(type(instance)))
        return [value for value in values if value is not MISSING]

    def copy(self, instance: Any, copies: Copies) -> list[tuple[Any, Any]]:
        """Those that have no value, too."""
        return [(slot, _value(slot, instance)) for slot in _slots(type(instance))]

    def same(self, instance: Any, memory: list[tuple[Any, Any]]) -> bool:
        """By identity."""
        return all(_value(slot, instance) is value for slot, value in memory)

    def put_back(self, instance: Any, memory: list[tuple[Any, Any]]) -> None:
        """Around a class's own `__setattr__`, which frozen ones refuse."""
        for slot, value in memory:
            if value is not MISSING:
                slot.__set__(instance, value)
            elif _value(slot, instance) is not MISSING:
                slot.__delete__(instance)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """The value of a slot."""
        slots = [slot for slot in _slots(type(instance)) if _value(slot, instance) is old]
        for slot in slots:
            slot.__set__(instance, new)


def _slots(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if "__slots__" in base.__dict__:
            yield from (
                slot for slot in base.__dict__.values() if isinstance(slot, MemberDescriptorType)
            )


def _value(slot: Any, instance: Any) -> Any:
    try:
        return slot.__get__(instance)
    except AttributeError:
        return MISSING


class Classes(Kind):
    """The attributes of the user's own classes; methods lead to what they name."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """Classes, whatever their metaclass."""
        return issubclass(cls, type)

    def children(self, instance: type) -> Iterable[Any]:
        """The attributes, and the classes that it is derived from."""
        if is_the_users_class(instance):
            yield from _own(instance).values()
            yield from instance.__bases__

    def copy(self, instance: type, copies: Copies) -> dict[str, Any] | None:
        """Nothing of a library's."""
        return _own(instance) if is_the_users_class(instance) else None

    def same(self, instance: type, memory: dict[str, Any] | None) -> bool:
        """By identity."""
        if memory is None:
            return True
        now = _own(instance)
        return len(now) == len(memory) and all(
            now.get(name, MISSING) is value for name, value in memory.items()
        )

    def put_back(self, instance: type, memory: dict[str, Any] | None) -> None:
        """Around a metaclass's own `__setattr__`."""
        saved, now = memory or {}, _own(instance)
        for name in now.keys() - saved.keys():
            type.__delattr__(instance, name)
        for name, value in saved.items():
            if now.get(name, MISSING) is not value:
                type.__setattr__(instance, name, value)

    def replace(self, instance: type, old: Any, new: Any) -> None:
        """A class attribute."""
        names = [name for name, value in _own(instance).items() if value is old]
        for name in names:
            type.__setattr__(instance, name, new)


def _own(cls: type) -> dict[str, Any]:
    attributes: MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return {
        name: value
        for name, value in attributes.items()
        if name not in OF_EVERY_CLASS and not isinstance(value, MemberDescriptorType)
    }
