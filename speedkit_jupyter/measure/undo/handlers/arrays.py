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

    bulky = True

    def recognizes(self, cls: type) -> bool:
        ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
        return ndarray is not None and issubclass(cls, ndarray)

    def children(self, instance: Any) -> Iterable[Any]:
        return _plain(instance).ravel().tolist() if instance.dtype == object else ()

    def copy(self, instance: Any, copies: Copies) -> Memory:
        plain = _plain(instance)
        if plain.dtype.hasobject and plain.dtype != object:
            raise TypeError("it holds objects in fields")
        fits = copies.fits(instance, plain.nbytes)
        return plain.copy(order="K") if fits else None, _header(plain)

    def same(self, instance: Any, memory: Memory) -> bool:
        return bool(_header(instance) == memory[1]) and self.same_values(instance, memory)

    def same_values(self, instance: Any, memory: Memory) -> bool:
        saved, plain = memory[0], _plain(instance)
        if saved is None:
            return True
        if plain.shape != saved.shape or plain.dtype != saved.dtype:
            return False
        if plain.dtype == object:
            return all(map(operator.is_, plain.ravel().tolist(), saved.ravel().tolist()))
        return bool((_bytes(plain) == _bytes(saved)).all())

    def put_back(self, instance: Any, memory: Memory) -> None:
        """Write into its own memory; a read-only array may be a view of one that is not."""
        import numpy as np

        saved, header = memory
        if _header(instance)[:3] != header[:3]:
            raise ValueError("its shape or dtype was changed in place")
        if saved is not None and not self.same_values(instance, memory):
            plain = _plain(instance)
            if not plain.flags.writeable:
                plain.setflags(write=True)
            np.copyto(plain, saved)
        if instance.flags.writeable != header[3]:
            instance.setflags(write=header[3])


def _plain(array: Any) -> Any:
    """Return a view without what a subclass does."""
    import numpy as np

    return array.view(np.ndarray)


def _header(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides, array.flags.writeable


def _bytes(plain: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8)
