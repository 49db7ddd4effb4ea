"""Read the size and values of tensors; skip freed storage, whose reading crashes the process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from speedkit_jupyter.torchglue.private import is_transformed, tree_leaves, version


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`: a tensor, or nested lists, dicts and other pytrees."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage has all its elements, unlike after storage.resize_(0)."""
    if tensor.layout is not torch.strided:
        return True
    try:
        with torch.DisableTorchFunction():  # modes must not count these calls as part of a step
            end: Any = tensor.numel()  # one past the last element
            if end and not tensor.is_nested:
                sides = zip(tensor.shape, tensor.stride(), strict=True)
                end = tensor.storage_offset() + 1 + sum((length - 1) * by for length, by in sides)
            return bool(end * tensor.element_size() <= tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, ValueError):  # a tensor without storage
        return True


def size_in_memory(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; a sparse tensor counts as if it were dense."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is not None:
        parts = [getattr(tensor, name) for name in names()[0]]  # includes a DTensor's mesh
        return sum(size_in_memory(part) for part in parts if hasattr(part, "untyped_storage"))
    size = tensor.numel() * tensor.element_size()
    return size if is_in_memory(tensor) else min(size, tensor.untyped_storage().nbytes())


# Minimum number of elements to sample in large tensors. Other `.data` writes go unnoticed.
SAMPLED = 256


def marks(tensors: Iterable[torch.Tensor]) -> list[object]:
    """Return each tensor's fingerprint: its version and, for a plain CPU tensor, some elements."""
    return [(version(tensor), _some(tensor)) for tensor in tensors]


def _some(tensor: torch.Tensor) -> bytes | None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not (is_plain and on_cpu and is_in_memory(tensor) and tensor.numel()):
        return None
    some = tensor.detach()  # `.data` writes and fused optimizers don't bump the version
    if some.is_contiguous():
        some = some.flatten()[:: max(1, tensor.numel() // SAMPLED)]
    else:
        for dim in range(some.ndim):  # take one corner, as flattening would copy all
            some = some.narrow(dim, 0, min(some.shape[dim], 4))
    return some.flatten().contiguous().view(torch.uint8).numpy().tobytes()


# --- values ---


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values as one strided tensor (inner tensors joined); None if unreadable."""
    values = tensor.detach() if has_values(tensor) else None
    if values is None or is_plain(values):
        return values
    with suppress(RuntimeError, TypeError):  # the layout or class lacks this operation
        if values.is_nested:
            return torch.cat([part.reshape(-1) for part in values.unbind()])
        if values.layout is not torch.strided:
            return values.to_dense()
        if values.is_quantized:
            return values.dequantize()
        if hasattr(values, "get_mask"):
            return torch.where(values.get_mask(), values.get_data(), 0)  # type: ignore[attr-defined]
        names = values.__tensor_flatten__()[0] if hasattr(values, "__tensor_flatten__") else ()
        inner = [getattr(values, name) for name in names]  # includes a DTensor's mesh
        parts = [plain(part) for part in inner if isinstance(part, torch.Tensor)]
        return torch.cat([part.flatten() for part in parts if part is not None]) if parts else None
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, not nested or quantized, with torch's own dispatch."""
    strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has readable values: it isn't meta, fake, freed or transformed."""
    is_fake = tensor.is_meta or hasattr(tensor, "fake_mode") or is_transformed(tensor)
    return not is_fake and is_in_memory(tensor)
