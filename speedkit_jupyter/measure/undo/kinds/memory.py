"""Memory in the user's own hand: torch's storages, mapped files, what ctypes has."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind

if TYPE_CHECKING:
    import torch


class Storages(Kind):
    """Bytes and how many. A typed storage has such a one as its attribute."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Without a type: that of every tensor."""
        import torch

        return issubclass(cls, torch.UntypedStorage)

    def copy(self, found: Any, copies: Copies) -> tuple[Any, int]:
        """The bytes; only their number where they are too many."""
        fits = copies.fits(found, found.nbytes()) and found.device.type != "meta"
        return _bytes(found).clone() if fits else None, found.nbytes()

    def glance(self, found: Any) -> tuple[Any, int]:
        """Without the bytes."""
        return None, found.nbytes()

    def same(self, found: Any, memory: tuple[Any, int]) -> bool:
        """Byte by byte."""
        import torch

        saved, size = memory
        return found.nbytes() == size and (saved is None or torch.equal(_bytes(found), saved))

    def put_back(self, found: Any, memory: tuple[Any, int]) -> None:
        """Into its own memory."""
        saved, size = memory
        if found.nbytes() != size:
            found.resize_(size)
        if saved is not None:
            _bytes(found).copy_(saved)


def _bytes(storage: Any) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Mapped(Kind):
    """Memory that is written through it: `memoryview`, `mmap`, what ctypes has."""

    # ctypes has one class of pointers to each type: it is named after who asked for it first.
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Those of Python's own."""
        data: Any = ctypes._SimpleCData.__mro__[1]
        return issubclass(cls, (memoryview, mmap.mmap, data))

    def children(self, found: Any) -> Iterable[Any]:
        """What a view is of, what a pointer points to."""
        if isinstance(found, memoryview):
            return (found.obj,)
        if isinstance(found, ctypes.py_object):
            return (found.value,) if found else ()
        kept = [one for one in gc.get_referents(found) if isinstance(one, dict)]
        return [one for held in kept for one in held.values()]

    def copy(self, found: Any, copies: Copies) -> tuple[bytes | None, int]:
        """The bytes, and of a mapped file where it is read."""
        view, position = _bytes_of(found), _position(found)
        if view.readonly or not view.contiguous or not copies.fits(found, view.nbytes):
            return None, position
        return view.tobytes(), position

    def same(self, found: Any, memory: tuple[bytes | None, int]) -> bool:
        """Byte by byte."""
        saved, position = memory
        if _position(found) != position:
            return False
        return saved is None or _bytes_of(found).tobytes() == saved

    def put_back(self, found: Any, memory: tuple[bytes | None, int]) -> None:
        """Into its own memory."""
        saved, position = memory
        if saved is not None:
            _bytes_of(found)[:] = saved
        if isinstance(found, mmap.mmap):
            found.seek(position)


def _position(found: Any) -> int:
    return found.tell() if isinstance(found, mmap.mmap) else 0


def _bytes_of(found: Any) -> memoryview:
    view = memoryview(found)
    if not view.contiguous:
        return view
    if not isinstance(found, memoryview | mmap.mmap):
        return memoryview((ctypes.c_char * ctypes.sizeof(found)).from_buffer(found)).cast("B")
    return view.cast("B")
