"""Whether a tensor has memory, without which reading crashes the process; and changes to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.torchglue.private import version as version

if TYPE_CHECKING:
    import torch


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage holds all its elements.

    `untyped_storage().resize_(0)`, as sharding and offloading do it, leaves the sizes as they are.
    """
    import torch

    if tensor.layout is not torch.strided:
        return True
    try:
        with torch.DisableTorchFunction():  # modes must not see these calls as the step's
            return bool(_reach(tensor) <= tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, ValueError):  # no storage of its own, or not yet
        return True


def size_in_memory(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; summed over its parts if it has parts."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is not None:
        parts = [getattr(tensor, name) for name in names()[0]]  # a DTensor's mesh is one, too
        return sum(size_in_memory(part) for part in parts if hasattr(part, "untyped_storage"))
    size = tensor.numel() * tensor.element_size()
    return size if is_in_memory(tensor) else min(size, tensor.untyped_storage().nbytes())


def _reach(tensor: torch.Tensor) -> int:
    """Return the byte of the storage at which the last element of a strided tensor ends."""
    count, size = tensor.numel(), tensor.element_size()
    if tensor.is_nested or not count:
        return int(count * size)
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in sides)
    return int(tensor.storage_offset() + last + 1) * size


# Elements of a contiguous tensor that are compared, spread evenly: a write that skips them all is
# not seen.
SAMPLED = 256

Mark = tuple[int, Any]


def marks(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """Return a mark of each tensor: its version, and some elements if it is on the CPU.

    Elements are compared because `.data` and fused optimizers write without a new version. Reading
    them from an accelerator would wait for it.
    """
    return [(version(tensor), _some(tensor)) for tensor in tensors]


def are_changed(tensors: Sequence[torch.Tensor], before: Sequence[Mark]) -> bool:
    """Return whether a tensor differs from its mark in `before`."""
    import torch

    exactly: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for (writes, some), (writes_now, now) in zip(before, marks(tensors), strict=True):
        if writes != writes_now:
            return True
        known = some is not None and now is not None
        if known and (some.shape != now.shape or not torch.allclose(now, some, **exactly)):
            return True
    return False


def _some(tensor: torch.Tensor) -> Any:
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not (is_plain and on_cpu and is_in_memory(tensor) and tensor.numel()):
        return None
    some = tensor.detach()
    if some.is_contiguous():
        return some.flatten()[:: max(1, tensor.numel() // SAMPLED)].clone()
    for dim in range(some.ndim):  # flattening would copy all of it
        some = some.narrow(dim, 0, min(some.shape[dim], 4))
    return some.clone()
