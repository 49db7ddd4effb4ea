"""Objects on their way between the notebook and a worker: by value, in memory that both share.

torch.save writes them, with cloudpickle for the functions and classes of cells. What these read by
name is bound in the namespace of the other side, where they run as if they were defined there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import cloudpickle
import torch

from speedkit_jupyter.optimizations.properties.sharding import dtensor

# State at module level, on purpose: pickle passes nothing to what it calls. Of this process.
_NAMESPACE: list[MutableMapping[str, Any]] = []


@dataclass
class Parcel:
    """What was packed: in memory of process `pid`, or `inline` for another host or system."""

    pid: int
    descriptor: int = -1
    inline: bytes = b""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def close(self) -> None:
        """Free the memory."""
        if self.descriptor >= 0 and self.pid == os.getpid():
            os.close(self.descriptor)
            self.descriptor = -1


class _Globals(dict[str, Any]):
    """The globals of functions of a cell, which are the other side's own there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _namespace, ()


def _namespace() -> MutableMapping[str, Any]:
    return _NAMESPACE[0]


def _pickling(space: MutableMapping[str, Any]) -> type:
    """Return what torch.save takes as a module: a pickler for objects of this namespace."""
    groups = torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup
    bound_to_a_group = (*groups, *dtensor())

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.globals_ref[id(space)] = _Globals()

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, bound_to_a_group):
                raise TypeError(f"{type(value).__name__} belongs to its process group")
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                return value.detach().__reduce_ex__(5)
            return super().reducer_override(value)

    return type("pickling", (), {"Pickler": Pickler})


def pack(value: Any, space: MutableMapping[str, Any], is_here: bool = True) -> Parcel:
    """Return a value with all that it reaches; `is_here` if it is read on this host."""
    parcel, pickling = Parcel(os.getpid()), _pickling(space)
    if not (is_here and hasattr(os, "memfd_create")):
        file = BytesIO()
        torch.save(value, file, pickling, 5)
        parcel.inline = file.getvalue()
        return parcel
    parcel.descriptor = os.memfd_create("speedkit")
    try:
        torch.save(value, parcel.path, pickling, 5)
    except BaseException:
        parcel.close()
        raise
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
    file = parcel.path if parcel.descriptor >= 0 else BytesIO(parcel.inline)
    _NAMESPACE[:] = [space]
    try:
        return torch.load(file, _here, weights_only=False)
    finally:
        _NAMESPACE.clear()


def _here(storage: Any, location: str) -> Any:
    """Return a storage on this process's device of its kind, or on the CPU where there is none."""
    kind = location.partition(":")[0]
    kind = kind if torch.accelerator.is_available() else "cpu"
    return torch.serialization.default_restore_location(storage, kind)
