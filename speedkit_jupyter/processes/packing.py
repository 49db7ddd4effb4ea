"""Objects on their way between the notebook and a worker: by value, tensors through shared memory.

cloudpickle takes functions and classes of cells by value. What they read by name is bound in the
namespace of the other side, where they run as if they were defined there.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle  # noqa: TID251 – nothing is saved; both ends are processes of this very session
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from speedkit_jupyter.processes import merging

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
        groups = torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup
        self.bound_to_a_group = (*groups, *merging.dtensor())
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.size = 0

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(value):
            return super().reducer_override(value)
        view = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
        needs_grad = value.requires_grad and value.is_leaf
        return _tensor, (value.untyped_storage(), view, type(value), needs_grad)

    def persistent_id(self, value: Any) -> Any:
        if value is self.base:
            return GLOBALS
        if isinstance(value, self.bound_to_a_group):
            raise TypeError(f"{type(value).__name__} belongs to its process group")
        if not isinstance(value, torch.UntypedStorage):
            return None
        if value.data_ptr() not in self.storages:
            self.storages[value.data_ptr()] = (self.size, value)
            self.size += -(-max(1, value.nbytes()) // ALIGNED) * ALIGNED
        return (self.storages[value.data_ptr()][0], value.nbytes(), value.device.type)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, block: Any, space: MutableMapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._block, self._space = block, space
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, token: Any) -> Any:
        """Return the namespace, or a copy of a storage on this process's device of that kind."""
        if token == GLOBALS:
            return self._space
        at, size, device = token
        if at not in self._storages:
            there = device if device == "cpu" or torch.accelerator.is_available() else "cpu"
            held = torch.empty(size, dtype=torch.uint8, device=there)
            if size:
                held.copy_(torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=at))
            self._storages[at] = held.untyped_storage()
        return self._storages[at]


def _tensor(storage: torch.UntypedStorage, view: Any, kind: type, needs_grad: bool) -> torch.Tensor:
    dtype, offset, shape, stride = view
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, shape, stride)
    is_parameter = kind is torch.nn.Parameter
    return (
        torch.nn.Parameter(tensor, needs_grad)
        if is_parameter
        else tensor.requires_grad_(needs_grad)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    is_real = tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and is_real and not vars(tensor)


def pack(value: Any, space: MutableMapping[str, Any], is_here: bool = True) -> Parcel:
    """Return a value with all that it reaches; `is_here` if it is read on this host."""
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


def refused(values: Mapping[str, Any], space: MutableMapping[str, Any]) -> dict[str, Exception]:
    """Return those that can't be packed, with the reason."""
    found = {}
    for name, value in values.items():
        try:
            pack(value, space).close()
        except Exception as error:  # whatever an object's own pickling raises
            found[name] = error
    return found


def unpack(parcel: Parcel, space: MutableMapping[str, Any]) -> Any:
    """Return the value; functions of cells read and bind names in `space`."""
    block: Any = bytearray(parcel.inline)
    if parcel.descriptor >= 0:
        with open(parcel.path, "rb") as file:
            block = mmap.mmap(file.fileno(), parcel.size, access=mmap.ACCESS_COPY)
    return _Unpickler(parcel.data, block, space).load()
