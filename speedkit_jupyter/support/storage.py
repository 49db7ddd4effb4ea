"""Whether there is memory behind a tensor: to read one without ends the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether its storage reaches as far as its sizes say.

    `untyped_storage().resize_(0)`, as sharding and offloading do it, leaves the sizes as they are.
    """
    import torch

    if tensor.layout is not torch.strided:
        return True
    try:
        with torch.DisableTorchFunction():  # none of ours takes it for the step's question
            return bool(_reach(tensor) <= tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, ValueError):  # no storage of its own, or not yet
        return True


def size_in_memory(tensor: torch.Tensor) -> int:
    """Return the bytes of its elements; of one whose memory was given back, those that are left; of
    one that consists of others, theirs.
    """
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is not None:
        parts = [getattr(tensor, name) for name in names()[0]]  # a DTensor's mesh is one, too
        return sum(size_in_memory(part) for part in parts if hasattr(part, "untyped_storage"))
    size = tensor.numel() * tensor.element_size()
    return size if is_in_memory(tensor) else min(size, tensor.untyped_storage().nbytes())


def _reach(tensor: torch.Tensor) -> int:
    """Return at which byte of its storage the last element of a strided tensor ends."""
    count, size = tensor.numel(), tensor.element_size()
    if tensor.is_nested or not count:
        return int(count * size)
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + count) * size
    last = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(tensor.storage_offset() + last + 1) * size
