"""Instances of any class, with a dictionary or slots, the user's own classes, callables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import (
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import (
    MISSING,
    Copies,
    StateHandler,
    attribute_dict,
)
from speedkit_jupyter.measure.undo.handlers.origin import is_the_users_class

# What a class has beside what its body says.
OF_EVERY_CLASS = frozenset(
    [
        "__dict__", "__weakref__", "_abc_impl", "__annotate__", "__annotations_cache__",
        "__slots__", "__static_attributes__", "__firstlineno__", "__parameters__",
        "__orig_bases__", "__type_params__",
    ]
)  # fmt: skip


class Attributes(StateHandler):
    """The class of an instance, and its dictionary, whose contents are those of any dict.

    Subclasses of list, tensors and functions have one too.
    """

    def recognizes(self, cls: type) -> bool:
        return cls.__dictoffset__ != 0 and not issubclass(cls, type | ModuleType)

    def children(self, instance: Any) -> Iterable[Any]:
        attributes = attribute_dict(instance)
        return () if attributes is None else (attributes,)

    def copy(self, instance: Any, copies: Copies) -> tuple[type, dict[str, Any] | None]:
        return type(instance), attribute_dict(instance)

    def put_back(self, instance: Any, memory: tuple[type, dict[str, Any] | None]) -> None:
        cls, attributes = memory
        if type(instance) is not cls:
            object.__setattr__(instance, "__class__", cls)
        if attribute_dict(instance) is not attributes:
            object.__setattr__(instance, "__dict__", attributes)


class Slots(StateHandler):
    """Attributes without a dictionary."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        return not issubclass(cls, type) and any("__slots__" in vars(base) for base in cls.__mro__)

    def children(self, instance: Any) -> Iterable[Any]:
        values = (_value(slot, instance) for slot in _slots(type(instance)))
        return [value for value in values if value is not MISSING]

    def copy(self, instance: Any, copies: Copies) -> list[tuple[Any, Any]]:
        return [(slot, _value(slot, instance)) for slot in _slots(type(instance))]

    def same(self, instance: Any, memory: list[tuple[Any, Any]]) -> bool:
        return all(_value(slot, instance) is value for slot, value in memory)

    def put_back(self, instance: Any, memory: list[tuple[Any, Any]]) -> None:
        """Write the slots themselves: frozen classes refuse `setattr`."""
        for slot, value in memory:
            if value is not MISSING:
                slot.__set__(instance, value)
            elif _value(slot, instance) is not MISSING:
                slot.__delete__(instance)

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        for slot, value in self.copy(instance, Copies()):
            if value is old:
                slot.__set__(instance, new)


def _slots(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            yield from (s for s in vars(base).values() if isinstance(s, MemberDescriptorType))


def _value(slot: Any, instance: Any) -> Any:
    try:
        return slot.__get__(instance)
    except AttributeError:
        return MISSING


class Classes(StateHandler):
    """The attributes of the user's own classes; methods lead to what they name."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, type)

    def children(self, instance: type) -> Iterable[Any]:
        if is_the_users_class(instance):
            yield from _own(instance).values()
            yield from instance.__bases__

    def copy(self, instance: type, copies: Copies) -> dict[str, Any] | None:
        return _own(instance) if is_the_users_class(instance) else None

    def put_back(self, instance: type, memory: dict[str, Any] | None) -> None:
        saved, now = memory or {}, _own(instance)
        for name in now.keys() - saved.keys():
            type.__delattr__(instance, name)
        for name, value in saved.items():
            if now.get(name, MISSING) is not value:
                type.__setattr__(instance, name, value)

    def replace(self, instance: type, old: Any, new: Any) -> None:
        for name in [name for name, value in _own(instance).items() if value is old]:
            type.__setattr__(instance, name, new)


def _own(cls: type) -> dict[str, Any]:
    attributes: MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return {
        name: value
        for name, value in attributes.items()
        if name not in OF_EVERY_CLASS and not isinstance(value, MemberDescriptorType)
    }
