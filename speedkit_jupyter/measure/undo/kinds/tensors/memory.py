"""Memory in the user's own hand: torch's storages, mapped files, what ctypes has."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind
from speedkit_jupyter.measure.undo.kinds.tensors.bits import bytes_of

if TYPE_CHECKING:
    import torch


class Storages(Kind):
    """Bytes and how many. A typed storage has such a one as its attribute."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Without a type: that of every tensor."""
        import torch

        return issubclass(cls, torch.UntypedStorage)

    def copy(self, instance: Any, copies: Copies) -> tuple[Any, int]:
        """The bytes; only their number where they are too many."""
        fits = copies.fits(instance, instance.nbytes()) and instance.device.type != "meta"
        return bytes_of(instance).clone() if fits else None, instance.nbytes()

    def glance(self, instance: Any) -> tuple[Any, int]:
        """Without the bytes."""
        return None, instance.nbytes()

    def same(self, instance: Any, memory: tuple[Any, int]) -> bool:
        """Byte by byte."""
        import torch

        saved, size = memory
        return instance.nbytes() == size and (
            saved is None or torch.equal(bytes_of(instance), saved)
        )

    def put_back(self, instance: Any, memory: tuple[Any, int]) -> None:
        """Into its own memory."""
        saved, size = memory
        if instance.nbytes() != size:
            instance.resize_(size)
        if saved is not None:
            bytes_of(instance).copy_(saved)


def known_in_part(objects: Collection[Any]) -> Iterator[torch.Tensor]:
    """Tensors in a memory of which only a part is known: what else lies in it is not copied."""
    import torch

    tensors = [instance for instance in objects if issubclass(type(instance), torch.Tensor)]
    whole = {instance._cdata for instance in objects if type(instance) is torch.UntypedStorage}
    parts: list[tuple[int, torch.Tensor]] = []
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError, ValueError):  # no memory of its own
            storage = tensor.untyped_storage()
            if tensor.numel() * tensor.element_size() >= storage.nbytes():
                whole.add(storage._cdata)
            else:
                parts.append((storage._cdata, tensor))
    yield from (tensor for address, tensor in parts if address not in whole)


class Mapped(Kind):
    """Memory that is written through it: `memoryview`, `mmap`, what ctypes has."""

    # ctypes has one class of pointers to each type: it is named after who asked for it first.
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Those of Python's own."""
        data: Any = ctypes._SimpleCData.__mro__[1]
        return issubclass(cls, (memoryview, mmap.mmap, data))

    def children(self, instance: Any) -> Iterable[Any]:
        """What a view is of, what a pointer points to."""
        if isinstance(instance, memoryview):
            return (instance.obj,)
        if isinstance(instance, ctypes.py_object):
            return (instance.value,) if instance else ()
        kept = [referent for referent in gc.get_referents(instance) if isinstance(referent, dict)]
        return [value for held in kept for value in held.values()]

    def copy(self, instance: Any, copies: Copies) -> tuple[bytes | None, int]:
        """The bytes, and of a mapped file where it is read."""
        view, position = _bytes_of(instance), _position(instance)
        if view.readonly or not view.contiguous or not copies.fits(instance, view.nbytes):
            return None, position
        return view.tobytes(), position

    def same(self, instance: Any, memory: tuple[bytes | None, int]) -> bool:
        """Byte by byte."""
        saved, position = memory
        if _position(instance) != position:
            return False
        return saved is None or _bytes_of(instance).tobytes() == saved

    def put_back(self, instance: Any, memory: tuple[bytes | None, int]) -> None:
        """Into its own memory."""
        saved, position = memory
        if saved is not None:
            _bytes_of(instance)[:] = saved
        if isinstance(instance, mmap.mmap):
            instance.seek(position)


def _position(instance: Any) -> int:
    return instance.tell() if isinstance(instance, mmap.mmap) else 0


def _bytes_of(instance: Any) -> memoryview:
    view = memoryview(instance)
    if not view.contiguous:
        return view
    if not isinstance(instance, memoryview | mmap.mmap):
        return memoryview((ctypes.c_char * ctypes.sizeof(instance)).from_buffer(instance)).cast("B")
    return view.cast("B")
