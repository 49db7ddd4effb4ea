"""Objects on their way between the notebook and a worker: by value, tensors through shared memory.

cloudpickle takes functions and classes of cells by value. What they read by name is bound in the
namespace of the other side, where they run as if they were defined there.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle  # noqa: TID251 – nothing is saved; both ends are processes of this very session
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    import torch

GLOBALS = "globals"
# A cache line: no two storages share one.
ALIGNED = 64


@dataclass
class Parcel:
    """A pickle, and the tensors that belong to it: in memory of process `pid`, or as `inline` bytes
    for another host or system.
    """

    data: bytes
    size: int = 0
    pid: int = 0
    descriptor: int = -1
    inline: bytes = b""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def close(self) -> None:
        """Let go of the memory; it is freed when the last process that reads it is done."""
        if self.descriptor >= 0 and self.pid == os.getpid():
            os.close(self.descriptor)
            self.descriptor = -1


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, space: MutableMapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        # The globals of functions of `space`, which cloudpickle would make anew.
        self.base = self.globals_ref.setdefault(id(space), {})
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        import torch

        if value is self.base:
            return GLOBALS
        if isinstance(value, _bound_to_a_group()):
            raise TypeError(f"{type(value).__name__} belongs to its process group")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(value):
            return None
        number, _ = self.tensors.setdefault(id(value), (len(self.tensors), value))
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = (self.size, storage)
            self.size += -(-storage.nbytes() // ALIGNED) * ALIGNED
        at, _ = self.storages[storage.data_ptr()]
        view = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
        is_parameter, device = type(value) is torch.nn.Parameter, value.device.type
        needs_grad = value.requires_grad and value.is_leaf
        return (number, at, storage.nbytes(), device, view, is_parameter, needs_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, block: Any, space: MutableMapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._block, self._space = block, space
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, token: Any) -> Any:
        import torch

        if token == GLOBALS:
            return self._space
        number, at, size, device, (dtype, offset, shape, stride), is_parameter, needs_grad = token
        if number not in self._tensors:
            if at not in self._storages:
                self._storages[at] = self._storage(at, size, device)
            tensor = torch.empty(0, dtype=dtype, device=self._storages[at].device)
            tensor.set_(self._storages[at], offset, shape, stride)
            whole = torch.nn.Parameter(tensor, needs_grad) if is_parameter else tensor
            self._tensors[number] = whole.requires_grad_(needs_grad)
        return self._tensors[number]

    def _storage(self, at: int, size: int, device: str) -> torch.UntypedStorage:
        """Return a copy of the bytes, on this process's own device of that kind."""
        import torch

        there = device if device == "cpu" or torch.accelerator.is_available() else "cpu"
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=there).untyped_storage()
        read = torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=at)
        return (read.clone() if there == "cpu" else read.to(there)).untyped_storage()


@cache
def _bound_to_a_group() -> tuple[type, ...]:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, DTensor, ProcessGroup


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    is_real = tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and is_real and not vars(tensor)


def pack(value: Any, space: MutableMapping[str, Any], is_here: bool = True) -> Parcel:
    """Return a value with all that it reaches; `is_here` if it is read on this host."""
    import torch

    file = io.BytesIO()
    pickler = _Pickler(file, space)
    pickler.dump(value)
    parcel = Parcel(file.getvalue(), pickler.size, os.getpid())
    if not parcel.size:
        return parcel
    is_shared = is_here and hasattr(os, "memfd_create")
    if is_shared:
        parcel.descriptor = os.memfd_create("speedkit")
        os.ftruncate(parcel.descriptor, parcel.size)
    block = mmap.mmap(parcel.descriptor, parcel.size)
    for at, storage in pickler.storages.values():
        if storage.nbytes():
            part = torch.frombuffer(block, dtype=torch.uint8, count=storage.nbytes(), offset=at)
            part.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    if not is_shared:
        parcel.inline = block[:]
    return parcel


def unpack(parcel: Parcel, space: MutableMapping[str, Any]) -> Any:
    """Return the value; functions of cells read and bind names in `space`."""
    block: Any = bytearray(parcel.inline)
    if parcel.descriptor >= 0:
        with open(parcel.path, "rb") as file:
            block = mmap.mmap(file.fileno(), parcel.size, access=mmap.ACCESS_COPY)
    return _Unpickler(parcel.data, block, space).load()
