"""Attributes: of instances, of instances with slots, of classes and modules of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MemberDescriptorType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import (
    MISSING,
    Copies,
    Holder,
    StateHandler,
    attribute_dict,
)
from speedkit_jupyter.measure.undo.ownership import is_installed, is_the_users_class


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


class Slots(Holder):
    """Attributes without a dictionary."""

    def recognizes(self, cls: type) -> bool:
        return not issubclass(cls, type) and any("__slots__" in vars(base) for base in cls.__mro__)

    def copy(self, instance: Any, copies: Copies) -> dict[Any, Any]:
        return {slot: _value(slot, instance) for slot in slots(type(instance))}

    def put_back(self, instance: Any, memory: dict[Any, Any]) -> None:
        """Write the slots themselves: frozen classes refuse `setattr`."""
        for slot, value in memory.items():
            if value is not MISSING:
                slot.__set__(instance, value)
            elif _value(slot, instance) is not MISSING:
                slot.__delete__(instance)


def slots(cls: type) -> Iterator[Any]:
    """Yield the descriptors of the attributes that a class keeps without a dictionary."""
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            yield from (s for s in vars(base).values() if isinstance(s, MemberDescriptorType))


def _value(slot: Any, instance: Any) -> Any:
    try:
        return slot.__get__(instance)
    except AttributeError:
        return MISSING


class Definitions(StateHandler):
    """The attributes of the user's own classes and modules; functions lead to what they name.

    Names that begin with two underscores are Python's, or torch.compile's, which looks its own up
    when compiled code runs.
    """

    types = (type, ModuleType)

    def children(self, instance: Any) -> Iterable[Any]:
        if not _is_the_users(instance):
            return
        if isinstance(instance, type):
            yield from instance.__bases__
            yield from vars(instance).values()
        else:
            yield from self.copy(instance, Copies()).values()

    def copy(self, instance: Any, copies: Copies) -> dict[str, Any]:
        if not _is_the_users(instance):
            return {}
        return {
            name: value
            for name, value in list(vars(instance).items())
            if name[:2] != "__" and not isinstance(value, MemberDescriptorType)
        }

    def put_back(self, instance: Any, memory: dict[str, Any]) -> None:
        base = type if isinstance(instance, type) else ModuleType
        now = self.copy(instance, Copies())
        for name in now.keys() - memory.keys():
            base.__delattr__(instance, name)
        for name, value in memory.items():
            if now.get(name, MISSING) is not value:
                base.__setattr__(instance, name, value)


def _is_the_users(instance: Any) -> bool:
    """Return whether the user wrote it; the names of the notebook itself are followed singly."""
    if isinstance(instance, type):
        return is_the_users_class(instance)
    home: Any = vars(instance).get("__name__")
    return isinstance(home, str) and home != "__main__" and not is_installed(home.split(".")[0])
