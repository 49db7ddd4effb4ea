"""NumPy's arrays: values, bit by bit, and how they lie in memory."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler

# A copy, or None for an array that is too large; dtype, shape, strides, writeable.
Memory = tuple[Any, tuple[Any, ...]]


class Arrays(StateHandler):
    """Arrays of every class. Arrays of objects hold them as a list does."""

    can_replace = True
    bulky = True

    def recognizes(self, cls: type) -> bool:
        ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
        return ndarray is not None and issubclass(cls, ndarray)

    def children(self, instance: Any) -> Iterable[Any]:
        parts = _parts(_plain(instance), True)
        return [element for part in parts for element in part.ravel().tolist()]

    def copy(self, instance: Any, copies: Copies) -> Memory:
        plain = _plain(instance)
        fits = copies.fits(instance, plain.nbytes)
        return plain.copy(order="K") if fits else None, _header(plain)

    def glance(self, instance: Any) -> Memory:
        return None, _header(instance)

    def same(self, instance: Any, memory: Memory) -> bool:
        return bool(_header(instance) == memory[1]) and self.same_values(instance, memory)

    def same_values(self, instance: Any, memory: Memory) -> bool:
        saved, plain = memory[0], _plain(instance)
        if saved is None:
            return True
        if plain.shape != saved.shape or plain.dtype != saved.dtype:
            return False
        for of_objects, alike in ((True, _same_objects), (False, _same_bytes)):
            pairs = zip(_parts(plain, of_objects), _parts(saved, of_objects), strict=True)
            if not all(alike(part, original) for part, original in pairs):
                return False
        return True

    def is_too_large(self, memory: Memory) -> bool:
        return memory[0] is None

    def put_back(self, instance: Any, memory: Memory) -> None:
        """Write into its own memory; a read-only array may be a view of one that is not."""
        import numpy as np

        saved, header = memory
        if _header(instance)[:3] != header[:3]:
            raise ValueError("its shape or dtype was changed in place")
        plain = _plain(instance)
        if saved is not None and not self.same_values(instance, memory):
            if not plain.flags.writeable:
                plain.setflags(write=True)
            np.copyto(plain, saved)
        if instance.flags.writeable != header[3]:
            instance.setflags(write=header[3])

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        plain = _plain(instance)
        for index, element in enumerate(plain.flat):
            if element is old:
                plain.flat[index] = new


def _plain(array: Any) -> Any:
    """Return a view without what a subclass does."""
    import numpy as np

    return array.view(np.ndarray)


def _header(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides, array.flags.writeable


def _parts(plain: Any, of_objects: bool) -> list[Any]:
    """Return the parts of objects, or all others: of a structured array its fields."""
    if plain.dtype.names and plain.dtype.hasobject:
        return [p for name in plain.dtype.names for p in _parts(plain[name], of_objects)]
    return [plain] if plain.dtype.hasobject == of_objects else []


def _same_objects(now: Any, saved: Any) -> bool:
    return all(map(operator.is_, now.ravel().tolist(), saved.ravel().tolist()))


def _same_bytes(now: Any, saved: Any) -> bool:
    return bool((_bytes(now) == _bytes(saved)).all())


def _bytes(plain: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8)
