"""Tensors of every layout and kind as plain ones: strided, with values that can be compared."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values in a strided tensor; None where it has none, or won't give them.

    Sparse and MKL-DNN tensors become dense, quantized ones numbers. Of a nested tensor its parts
    lie one after the other, along their first dimension where that is all they differ in.
    """
    values = tensor.detach() if has_values(tensor) else None
    if values is None or is_plain(values):
        return values
    with suppress(RuntimeError, TypeError):  # a layout, or a class, without this operation
        if values.is_nested:
            return _joined(values)
        if _is_strided(values):
            return values.dequantize() if values.is_quantized else _inside(values)
        return values.to_dense()
    return None


def or_nothing(tensor: torch.Tensor) -> torch.Tensor:
    """As `plain`; without elements where there is nothing to compare."""
    import torch

    values = plain(tensor)
    return torch.empty(0, dtype=tensor.dtype) if values is None else values


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is strided memory and nothing else."""
    strided = _is_strided(tensor) and not (tensor.is_nested or tensor.is_quantized)
    return strided and not is_made_of_others(tensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Not on the meta device, not a fake, not out of one of `torch.func`'s transforms, and with
    memory behind it: to read a tensor whose memory was given back ends the process.
    """
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if tensor.is_meta or (fakes is not None and isinstance(tensor, fakes.FakeTensor)):
        return False
    return not is_transformed(tensor) and is_in_memory(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it belongs into `vmap`, `grad` or another of `torch.func`'s transforms."""
    import torch

    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether operations on it are another class's: of a jagged or masked tensor, say."""
    import torch

    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_strided(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided


def _inside(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor consists of, one after the other; of a masked one what is not masked out."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if hasattr(tensor, "get_mask") and hasattr(tensor, "get_data"):
        return torch.where(tensor.get_mask(), tensor.get_data(), 0)
    if not is_traceable_wrapper_subclass(tensor):
        return None
    parts = [plain(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    return torch.cat([part.flatten() for part in parts if part is not None])


def _joined(nested: torch.Tensor) -> torch.Tensor:
    import torch

    parts = [part if part.dim() else part.reshape(1) for part in nested.unbind()]
    if len({part.shape[1:] for part in parts}) != 1:
        parts = [part.flatten() for part in parts]
    return torch.cat(parts) if parts else torch.empty(0, dtype=nested.dtype)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What lies in its `.grad`; torch warns where a tensor is asked that can't hold one."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
