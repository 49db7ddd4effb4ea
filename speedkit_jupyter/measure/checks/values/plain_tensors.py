"""Tensors of every layout and kind as plain ones: strided, with values that can be compared."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from speedkit_jupyter.support.storage import is_in_memory
from speedkit_jupyter.support.torch_private import is_made_of_tensors
from speedkit_jupyter.support.torch_private import is_transformed as is_transformed

if TYPE_CHECKING:
    import torch


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the same values in a strided tensor; None where it has none, or won't give them.

    Sparse and MKL-DNN tensors become dense, quantized ones numbers; the parts of nested tensors,
    and of those made of others, lie one after the other.
    """
    import torch

    values = tensor.detach() if has_values(tensor) else None
    if values is None or is_plain(values):
        return values
    with suppress(RuntimeError, TypeError):  # a layout, or a class, without this operation
        if values.is_nested:
            return torch.cat([part.reshape(-1) for part in values.unbind()])
        if values.layout is not torch.strided:
            return values.to_dense()
        return values.dequantize() if values.is_quantized else _inside(values)
    return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether it is strided memory and nothing else."""
    import torch

    strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return strided and not is_made_of_others(tensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether it can be read.

    Not on the meta device, not a fake, not out of one of `torch.func`'s transforms, and with
    memory behind it: to read a tensor whose memory was given back ends the process.
    """
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        return False
    return not is_transformed(tensor) and is_in_memory(tensor)


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether operations on it are another class's: of a jagged or masked tensor, say."""
    import torch

    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _inside(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a tensor consists of, one after the other; of a masked one what is not masked."""
    import torch

    if hasattr(tensor, "get_mask") and hasattr(tensor, "get_data"):
        return torch.where(tensor.get_mask(), tensor.get_data(), 0)
    if not is_made_of_tensors(tensor):
        return None
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]
    parts = [plain(part) for part in inner if isinstance(part, torch.Tensor)]
    return torch.cat([part.flatten() for part in parts if part is not None])
