"""Define the base classes of state handlers, and limit the bytes that are copied."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

MISSING = object()
# Limits in bytes for one copy and for all copies; tensors of models and optimizers have no limit.
# Larger objects are probably data that steps only read: they are reported, not copied.
MOST_COPIED_BYTES, MOST_COPIED_IN_ALL = 2**28, 2**31


class CopyBudget:
    """Track the bytes left for copies. Objects with an id in `required` are copied at any size."""

    def __init__(self, off_device: bool = False, required: Iterable[int] = ()) -> None:
        self.off_device = off_device
        self.too_large: list[Any] = []
        self._required = frozenset(required)
        self._left = MOST_COPIED_IN_ALL

    def fits(self, instance: Any, size: int) -> bool:
        """Reserve `size` bytes if the limits allow; else record the object, and return False."""
        if id(instance) in self._required:
            return True
        if size > min(MOST_COPIED_BYTES, self._left):
            self.too_large.append(instance)
            return False
        self._left -= size
        return True


class StateHandler:
    """Handle one kind of state. A list subclass, for example, has two kinds: items and attributes.

    `copy` returns an object's values, or references to its parts (`children`). The contents of the
    parts are copied by the handlers of the parts.
    """

    types: tuple[type, ...] = ()  # classes with this kind of state
    bulky = False  # True if a snapshot reuses an earlier snapshot's copies of unchanged objects
    has_state = True  # True if the objects have state to restore

    def recognizes(self, cls: type) -> bool:
        """Return whether instances of this class have this kind of state."""
        return issubclass(cls, self.types)

    def children(self, instance: Any) -> Iterable[Any]:
        """Return the objects that an object holds, without running the user's code."""
        return ()

    def copy(self, instance: Any, copies: CopyBudget) -> Any:
        """Return a copy of the object's contents, if `copies` allows. May raise any Exception."""
        return None

    def same(self, instance: Any, memory: Any) -> bool:
        """Return whether the object equals its copy; by default parts are compared by identity."""
        now = self.copy(instance, CopyBudget())
        if isinstance(memory, dict):
            parts = (now.get(key, MISSING) is part for key, part in memory.items())
            return now.keys() == memory.keys() and all(parts)
        return len(now) == len(memory) and all(map(operator.is_, now, memory))

    def same_values(self, instance: Any, memory: Any) -> bool:
        """Return whether the object has the copied values; address and strides may differ."""
        return self.same(instance, memory)

    def takes_as_long(self, instance: Any, memory: Any) -> bool:
        """Return whether a step takes the same time with the copied as with the current values."""
        return False

    def put_back(self, instance: Any, memory: Any) -> None:
        """Write the copied contents back into the object."""

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """Replace all references to `old` in the object by references to `new`."""

    def is_unrestorable(self, instance: Any) -> bool:
        """Return whether the object can't be restored; if so, the user is told before the run."""
        return False


class CompositeHandler(StateHandler):
    """Handle state that consists of references to other objects, such as the elements of a list."""

    def children(self, instance: Any) -> Iterable[Any]:
        memory = self.copy(instance, CopyBudget())
        return memory.values() if isinstance(memory, dict) else memory


class NamedParts(CompositeHandler):
    """Handle state that consists of named references; the copy is a dict."""

    def write(self, instance: Any, name: Any, value: Any) -> None:
        """Set the part `name` of the object."""
        setattr(instance, name, value)

    def delete(self, instance: Any, name: Any) -> None:
        """Delete the part `name` of the object."""
        delattr(instance, name)

    def put_back(self, instance: Any, memory: dict[Any, Any]) -> None:
        now = self.copy(instance, CopyBudget())
        for name in now.keys() - memory.keys():
            self.delete(instance, name)
        for name, value in memory.items():
            if now.get(name, MISSING) is not value:
                self.write(instance, name, value)


def attribute_dict(instance: Any) -> dict[str, Any] | None:
    """Return an instance's `__dict__`, or None, without calling the user's `__getattribute__`."""
    try:
        attributes = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None
