"""What every kind of state answers: what it is, what lies behind it, how it is put back."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

MISSING = object()
# Larger tensors and arrays that are neither parameters nor optimizer state are data: they are not
# copied, a checksum says whether they were written to. So are those beyond so many bytes in all.
MOST_BYTES, MOST_BYTES_IN_ALL = 2**28, 2**31
PACKAGE = __name__.partition(".")[0]


class Copies:
    """Where copies are made, and how many bytes of data they may still take.

    `required` are the ids of tensors that are copied whatever their size. Copies of tensors lie
    beside them, or in main memory where `off_device` is set.
    """

    def __init__(self, off_device: bool = False, most_bytes: int = MOST_BYTES_IN_ALL) -> None:
        self.off_device = off_device
        self.required: set[int] = set()
        self._left = most_bytes

    def fits(self, instance: Any, size: int) -> bool:
        """Whether so many bytes of an object are to be copied; they then are counted."""
        if id(instance) in self.required:
            return True
        if size > min(MOST_BYTES, self._left):
            return False
        self._left -= size
        return True


class Kind:
    """One kind of state. An object may be of several: a list of a class with attributes.

    A kind is known by the type. `copy` makes a memory of what an object of this kind holds itself,
    by identity; what lies behind it (`children`) are objects with memories of their own. So an
    object is walked, copied, compared and put back by the same few lines.
    """

    # Whether it holds values of many bytes, which are compared apart; whether there is anything to
    # put back; whether it can hold another object in the place of one (`replace`).
    bulky = False
    has_state = True
    can_replace = False
    # Whether it holds for classes of threads, event loops and compilers, which are left alone
    # otherwise; whether it knows what an object keeps in C, if it is of such a class.
    anywhere = False
    knows_memory = True

    def recognizes(self, cls: type) -> bool:
        """Whether instances of this class are of this kind."""
        raise NotImplementedError

    def children(self, instance: Any) -> Iterable[Any]:
        """The objects that it holds. Nothing is run and no attribute is computed."""
        return ()

    def copy(self, instance: Any, copies: Copies) -> Any:
        """A memory of what it holds; raises what copying raises."""
        return None

    def glance(self, instance: Any) -> Any:
        """A cheap memory, to be compared by `same`, of what it holds now."""
        return self.copy(instance, Copies())

    def same(self, instance: Any, memory: Any) -> bool:
        """Whether it holds what it held."""
        return True

    def same_values(self, instance: Any, memory: Any) -> bool:
        """Whether the values of many bytes are the same, wherever they lie by now."""
        return self.same(instance, memory)

    def is_too_large(self, memory: Any) -> bool:
        """Whether only a checksum was taken."""
        return False

    def same_checksum(self, instance: Any, memory: Any) -> bool:
        """Whether what was too large to copy is what it was."""
        return True

    def put_back(self, instance: Any, memory: Any) -> None:
        """Make it hold again what it held."""

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """Let it hold another object in the place of one."""

    def beyond(self, instance: Any) -> str:
        """Why it can't be put back, if it can't."""
        return ""


def is_the_plans(value: Any) -> bool:
    """Whether a plan put it there: another measurement's, or the same one applied anew."""
    function = value.__func__ if type(value) is MethodType else value
    for _ in range(4):
        if type(function) is not FunctionType:
            break
        if function.__globals__.get("__name__", "").partition(".")[0] == PACKAGE:
            return True
        function = vars(function).get("__wrapped__")
    cls = type(value)
    home = getattr(cls, "__module__", "") or ""
    return home.partition(".")[0] == PACKAGE and not hasattr(cls, "replays")


def attribute_dict(instance: Any) -> dict[str, Any] | None:
    """An instance's own attributes, read without running any code of its class."""
    try:
        attributes = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None
