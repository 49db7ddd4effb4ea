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

    def children(self, found: Any) -> Iterable[Any]:
        """Objects, where it holds some."""
        return [one for part in _parts(_plain(found), True) for one in part.ravel().tolist()]

    def copy(self, found: Any, copies: Copies) -> Memory:
        """A copy; or a checksum where it would be too large."""
        plain = _plain(found)
        if copies.fits(found, plain.nbytes):
            return plain.copy(order="K"), None, _header(plain)
        return None, _checksum(plain), _header(plain)

    def glance(self, found: Any) -> Memory:
        """How it lies: values are compared apart."""
        return None, None, _header(found)

    def same(self, found: Any, memory: Memory) -> bool:
        """Also whether it can be written."""
        return bool(_header(found) == memory[2]) and self.same_values(found, memory)

    def same_values(self, found: Any, memory: Memory) -> bool:
        """Bit by bit; objects by identity."""
        saved, plain = memory[0], _plain(found)
        if saved is None:
            return True
        if plain.shape != saved.shape or plain.dtype != saved.dtype:
            return False
        for of_objects, alike in ((True, _same_objects), (False, _same_bytes)):
            pairs = zip(_parts(plain, of_objects), _parts(saved, of_objects), strict=True)
            if not all(alike(one, other) for one, other in pairs):
                return False
        return True

    def is_too_large(self, memory: Memory) -> bool:
        """Data."""
        return memory[1] is not None

    def same_checksum(self, found: Any, memory: Memory) -> bool:
        """Of what was too large to copy."""
        return bool(_checksum(_plain(found)) == memory[1])

    def put_back(self, found: Any, memory: Memory) -> None:
        """Into its own memory. A read-only one may be a view of one that is not."""
        import numpy as np

        saved, _, header = memory
        if _header(found)[:3] != header[:3]:
            _lay(found, header)
        plain = _plain(found)
        if saved is not None and not self.same_values(found, memory):
            if not plain.flags.writeable:
                plain.setflags(write=True)
            np.copyto(plain, saved)
        if found.flags.writeable != header[3]:
            found.setflags(write=header[3])

    def replace(self, found: Any, old: Any, new: Any) -> None:
        """An object in it."""
        plain = _plain(found)
        for index, one in enumerate(plain.flat):
            if one is old:
                plain.flat[index] = new


def _plain(found: Any) -> Any:
    """Without what a subclass does."""
    return found.view(_numpy("ndarray"))


def _header(found: Any) -> tuple[Any, ...]:
    return found.dtype, found.shape, found.strides, found.flags.writeable


def _lay(found: Any, header: tuple[Any, ...]) -> None:
    """As it lay; numpy would rather have a view, but it is this object that others hold."""
    dtype, shape, strides, _ = header
    size = math.prod(shape) * dtype.itemsize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if found.nbytes != size:
            found.resize(size // found.dtype.itemsize, refcheck=False)
        if found.dtype != dtype:
            found.dtype = dtype
        if found.shape != shape:
            found.shape = shape
        if found.strides != strides:
            found.strides = strides


def _parts(plain: Any, of_objects: bool) -> list[Any]:
    """The fields of a structured array, or itself: those of objects, or all others."""
    if plain.dtype.names and plain.dtype.hasobject:
        return [p for name in plain.dtype.names for p in _parts(plain[name], of_objects)]
    return [plain] if plain.dtype.hasobject == of_objects else []


def _same_objects(one: Any, other: Any) -> bool:
    return all(map(operator.is_, one.ravel().tolist(), other.ravel().tolist()))


def _same_bytes(one: Any, other: Any) -> bool:
    return bool((_bytes(one) == _bytes(other)).all())


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

    def children(self, found: Any) -> Iterable[Any]:
        """Objects in its cells are values here."""
        return ()

    def copy(self, found: Any, copies: Copies) -> Any:
        """All blocks."""
        fits = copies.fits(found, int(found.memory_usage(index=True).sum()))
        return found._mgr.copy(deep=True) if fits else None

    def glance(self, found: Any) -> Any:
        """Nothing: values are compared apart."""
        return None

    def same(self, found: Any, memory: Any) -> bool:
        """What is missing equals itself."""
        return memory is None or bool(found._mgr.equals(memory))

    def put_back(self, found: Any, memory: Any) -> None:
        """The same frame, with blocks of its own."""
        found._mgr = memory.copy(deep=True)
        getattr(found, "_item_cache", {}).clear()
