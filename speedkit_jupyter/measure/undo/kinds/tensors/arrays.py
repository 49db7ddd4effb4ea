"""Numbers that are no tensors: numpy's arrays, pandas' frames."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind

# A copy or, where it is too large, a checksum; dtype, shape, strides, whether it can be written.
Memory = tuple[Any, Any, tuple[Any, ...]]


def _numpy(name: str) -> Any:
    """A name of numpy's; None where the user's code has not loaded it."""
    return getattr(sys.modules.get("numpy"), name, None)


class Arrays(Kind):
    """Values, bit by bit, and how they lie. Arrays of objects hold them as a list does."""

    can_replace = True

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Also masked arrays and those in a file."""
        ndarray = _numpy("ndarray")
        return ndarray is not None and issubclass(cls, ndarray)

    def children(self, instance: Any) -> Iterable[Any]:
        """Objects, where it holds some."""
        return [
            element for part in _parts(_plain(instance), True) for element in part.ravel().tolist()
        ]

    def copy(self, instance: Any, copies: Copies) -> Memory:
        """A copy; or a checksum where it would be too large."""
        plain = _plain(instance)
        if copies.fits(instance, plain.nbytes):
            return plain.copy(order="K"), None, _header(plain)
        return None, _checksum(plain), _header(plain)

    def glance(self, instance: Any) -> Memory:
        """How it lies: values are compared apart."""
        return None, None, _header(instance)

    def same(self, instance: Any, memory: Memory) -> bool:
        """Also whether it can be written."""
        return bool(_header(instance) == memory[2]) and self.same_values(instance, memory)

    def same_values(self, instance: Any, memory: Memory) -> bool:
        """Bit by bit; objects by identity."""
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
        """Data."""
        return memory[1] is not None

    def same_checksum(self, instance: Any, memory: Memory) -> bool:
        """Of what was too large to copy."""
        return bool(_checksum(_plain(instance)) == memory[1])

    def put_back(self, instance: Any, memory: Memory) -> None:
        """Into its own memory. A read-only one may be a view of one that is not."""
        import numpy as np

        saved, _, header = memory
        if _header(instance)[:3] != header[:3]:
            _lay(instance, header)
        plain = _plain(instance)
        if saved is not None and not self.same_values(instance, memory):
            if not plain.flags.writeable:
                plain.setflags(write=True)
            np.copyto(plain, saved)
        if instance.flags.writeable != header[3]:
            instance.setflags(write=header[3])

    def replace(self, instance: Any, old: Any, new: Any) -> None:
        """An object in it."""
        plain = _plain(instance)
        for index, element in enumerate(plain.flat):
            if element is old:
                plain.flat[index] = new


def _plain(array: Any) -> Any:
    """Without what a subclass does."""
    return array.view(_numpy("ndarray"))


def _header(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides, array.flags.writeable


def _lay(array: Any, header: tuple[Any, ...]) -> None:
    """As it lay; numpy would rather have a view, but it is this object that others hold."""
    dtype, shape, strides, _ = header
    size = math.prod(shape) * dtype.itemsize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if array.nbytes != size:
            array.resize(size // array.dtype.itemsize, refcheck=False)
        if array.dtype != dtype:
            array.dtype = dtype
        if array.shape != shape:
            array.shape = shape
        if array.strides != strides:
            array.strides = strides


def _parts(plain: Any, of_objects: bool) -> list[Any]:
    """The fields of a structured array, or itself: those of objects, or all others."""
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


def _checksum(plain: Any) -> Any:
    import zlib

    return zlib.crc32(_bytes(plain))


class Frames(Kind):
    """pandas' frames and series: their blocks, index and columns."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Where the user has loaded pandas."""
        pandas = sys.modules.get("pandas")
        frames = [getattr(pandas, name, None) for name in ("DataFrame", "Series")]
        return pandas is not None and issubclass(cls, tuple(f for f in frames if f is not None))

    def children(self, instance: Any) -> Iterable[Any]:
        """Objects in its cells are values here."""
        return ()

    def copy(self, instance: Any, copies: Copies) -> Any:
        """All blocks."""
        fits = copies.fits(instance, int(instance.memory_usage(index=True).sum()))
        return instance._mgr.copy(deep=True) if fits else None

    def glance(self, instance: Any) -> Any:
        """Nothing: values are compared apart."""
        return None

    def same(self, instance: Any, memory: Any) -> bool:
        """What is missing equals itself."""
        return memory is None or bool(instance._mgr.equals(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        """The same frame, with blocks of its own."""
        instance._mgr = memory.copy(deep=True)
        getattr(instance, "_item_cache", {}).clear()
