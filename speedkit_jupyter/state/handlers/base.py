"""The base of all handlers of state: find, copy and put back one kind of object."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

MISSING = object()
# Larger tensors and arrays that are neither parameters nor optimizer state are data, which steps
# read: they are named, not copied. The second number limits all copies of data together.
MOST_BYTES, MOST_BYTES_IN_ALL = 2**28, 2**31


class CopyBudget:
    """The bytes that may still be copied; objects with a `required` id are copied at any size."""

    def __init__(self, off_device: bool = False, required: Iterable[int] = ()) -> None:
        self.off_device = off_device
        self.too_large: list[Any] = []
        self._required = frozenset(required)
        self._left = MOST_BYTES_IN_ALL

    def fits(self, instance: Any, size: int) -> bool:
        """Return whether an object of `size` bytes is to be copied, and count it."""
        if id(instance) in self._required:
            return True
        if size > min(MOST_BYTES, self._left):
            self.too_large.append(instance)
            return False
        self._left -= size
        return True


class StateHandler:
    """One kind of state. An object may have several: a list of a class with attributes.

    `copy` makes a memory of the parts that the object itself holds, by identity; these parts
    (`children`) have memories of their own.
    """

    types: tuple[type, ...] = ()  # the classes of its objects
    bulky = False  # whether it holds many bytes of values
    has_state = True  # whether there is anything to put back

    def recognizes(self, cls: type) -> bool:
        """Return whether instances of this class have this kind of state."""
        return issubclass(cls, self.types)

    def children(self, instance: Any) -> Iterable[Any]:
        """Return the objects that it holds, without running code or computing attributes."""
        return ()

    def copy(self, instance: Any, copies: CopyBudget) -> Any:
        """Return a memory of its contents. Raises the errors of copying."""
        return None

    def same(self, instance: Any, memory: Any) -> bool:
        """Return whether it holds the same as the memory: by default, parts by identity."""
        now = self.copy(instance, CopyBudget())
        if isinstance(memory, dict):
            parts = (now.get(key, MISSING) is part for key, part in memory.items())
            return now.keys() == memory.keys() and all(parts)
        return len(now) == len(memory) and all(map(operator.is_, now, memory))

    def same_values(self, instance: Any, memory: Any) -> bool:
        """Return whether the values are the same, at any place in memory."""
        return self.same(instance, memory)

    def takes_as_long(self, instance: Any, memory: Any) -> bool:
        """Return whether a step takes as long with the copied values as with its own."""
        return False

    def put_back(self, instance: Any, memory: Any) -> None:
        """Write the contents of the memory back into the object."""

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """Replace `old` by `new` wherever the object holds it."""

    def is_unrestorable(self, instance: Any) -> bool:
        """Return whether it can't be put back, which is then said before the run."""
        return False


class CompositeHandler(StateHandler):
    """A kind of state that consists of other objects; its copy refers to them."""

    def children(self, instance: Any) -> Iterable[Any]:
        memory = self.copy(instance, CopyBudget())
        return memory.values() if isinstance(memory, dict) else memory


class NamedParts(CompositeHandler):
    """A kind of state that consists of other objects under names; a memory is a dict of these."""

    def write(self, instance: Any, name: Any, value: Any) -> None:
        """Set the part `name` of the object to the value."""
        setattr(instance, name, value)

    def delete(self, instance: Any, name: Any) -> None:
        """Delete the part `name` of the object, so that it holds nothing there."""
        delattr(instance, name)

    def put_back(self, instance: Any, memory: dict[Any, Any]) -> None:
        now = self.copy(instance, CopyBudget())
        for name in now.keys() - memory.keys():
            self.delete(instance, name)
        for name, value in memory.items():
            if now.get(name, MISSING) is not value:
                self.write(instance, name, value)


def attribute_dict(instance: Any) -> dict[str, Any] | None:
    """Return an instance's own attributes without running any code of its class."""
    try:
        attributes = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None
