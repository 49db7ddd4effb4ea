"""Values of tensors of any kind, as a strided tensor of torch's own class."""

from __future__ import annotations

from contextlib import suppress

import torch

from speedkit_jupyter.torchglue.private import is_transformed
from speedkit_jupyter.torchglue.storage import is_in_memory


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor as a strided tensor; None if they can't be read.

    Parts of nested tensors, and of tensors made of other tensors, are flattened and concatenated.
    """
    values = tensor.detach() if has_values(tensor) else None
    if values is None or is_plain(values):
        return values
    with suppress(RuntimeError, TypeError):  # a layout, or a class, without this operation
        if values.is_nested:
            return torch.cat([part.reshape(-1) for part in values.unbind()])
        if values.layout is not torch.strided:
            return values.to_dense()
        if values.is_quantized:
            return values.dequantize()
        if hasattr(values, "get_mask"):
            return torch.where(values.get_mask(), values.get_data(), 0)  # type: ignore[attr-defined]
        names = values.__tensor_flatten__()[0] if hasattr(values, "__tensor_flatten__") else ()
        inner = [getattr(values, name) for name in names]  # a DTensor's mesh is one, too
        parts = [plain(part) for part in inner if isinstance(part, torch.Tensor)]
        return torch.cat([part.flatten() for part in parts if part is not None]) if parts else None
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, and of a class without operations of its own."""
    strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be read; reading freed memory crashes the process."""
    is_fake = tensor.is_meta or hasattr(tensor, "fake_mode") or is_transformed(tensor)
    return not is_fake and is_in_memory(tensor)
