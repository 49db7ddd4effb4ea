"""Numbers that are no tensors: numpy's arrays, pandas' frames, memory of C."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.kinds.base import Copies, Kind


def _numpy(name: str) -> Any:
    """A name of numpy's; None where the user's code has not loaded it."""
    return getattr(sys.modules.get("numpy"), name, None)


class Arrays(Kind):
    """Values, bit by bit, and the shape. Arrays of objects hold them as a list does."""

    can_replace = True

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Also masked arrays and those in a file."""
        ndarray = _numpy("ndarray")
        return ndarray is not None and issubclass(cls, ndarray)

    def children(self, found: Any) -> Iterable[Any]:
        """Objects, where it holds some."""
        return found.ravel().tolist() if found.dtype.hasobject else ()

    def copy(self, found: Any, copies: Copies) -> tuple[Any, Any]:
        """A copy; or a checksum where it would be too large. A read-only one may be a view."""
        plain = _plain(found)
        if copies.fits(found, plain.nbytes):
            return plain.copy(order="K"), None
        return None, _checksum(plain)

    def glance(self, found: Any) -> tuple[Any, Any]:
        """Nothing: values are compared apart."""
        return None, None

    def same(self, found: Any, memory: tuple[Any, Any]) -> bool:
        """Bit by bit; objects by identity."""
        import operator

        saved, plain = memory[0], _plain(found)
        if saved is None:
            return True
        if plain.shape != saved.shape or plain.dtype != saved.dtype:
            return False
        if plain.dtype.hasobject:
            return all(map(operator.is_, plain.ravel().tolist(), saved.ravel().tolist()))
        return bool((_bytes(plain) == _bytes(saved)).all())

    def is_too_large(self, memory: tuple[Any, Any]) -> bool:
        """Data."""
        return memory[1] is not None

    def same_checksum(self, found: Any, memory: tuple[Any, Any]) -> bool:
        """Of what was too large to copy."""
        return bool(_checksum(_plain(found)) == memory[1])

    def put_back(self, found: Any, memory: tuple[Any, Any]) -> None:
        """Into its own memory."""
        import numpy as np

        saved, plain = memory[0], _plain(found)
        if plain.shape != saved.shape:
            if plain.size != saved.size:
                found.resize(saved.shape, refcheck=False)
            else:
                found.shape = saved.shape
            plain = _plain(found)
        if not plain.flags.writeable:
            plain.setflags(write=True)
        np.copyto(plain, saved)

    def replace(self, found: Any, old: Any, new: Any) -> None:
        """An object in it."""
        plain = _plain(found)
        for index, one in enumerate(plain.flat):
            if one is old:
                plain.flat[index] = new


def _plain(found: Any) -> Any:
    """Without what a subclass does."""
    return found.view(_numpy("ndarray"))


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


class Mapped(Kind):
    """Memory that is written through it: `memoryview`, `mmap`, ctypes' structures and arrays."""

    def recognizes(self, cls: type) -> bool:
        """Those of Python's own."""
        return issubclass(cls, (memoryview, mmap.mmap, ctypes.Structure, ctypes.Union)) or (
            issubclass(cls, (ctypes.Array, ctypes._SimpleCData))  # type: ignore[arg-type]
        )

    def copy(self, found: Any, copies: Copies) -> bytes | None:
        """The bytes, and of a mapped file where it is read."""
        view = _bytes_of(found)
        if view.readonly or not copies.fits(found, view.nbytes):
            return None
        return view.tobytes() if view.contiguous else None

    def same(self, found: Any, memory: bytes | None) -> bool:
        """Byte by byte."""
        return memory is None or _bytes_of(found).tobytes() == memory

    def put_back(self, found: Any, memory: bytes) -> None:
        """Into its own memory."""
        _bytes_of(found)[:] = memory


def _bytes_of(found: Any) -> memoryview:
    view = memoryview(found)
    if not view.contiguous:
        return view
    if isinstance(found, ctypes.Structure | ctypes.Union | ctypes.Array | ctypes._SimpleCData):
        return memoryview((ctypes.c_char * ctypes.sizeof(found)).from_buffer(found)).cast("B")
    return view.cast("B")
