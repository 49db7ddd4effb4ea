"""Whether a tensor was written to, as far as its version and a few of its numbers tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.storage import is_in_memory
from speedkit_jupyter.support.torch_private import version as version

if TYPE_CHECKING:
    import torch

# How many numbers of each tensor.
FEW = 256

Mark = tuple[int, Any]


def marks(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """Return them as they are now. Numbers count beside versions, since not everything that writes
    raises them (`.data`, fused optimizers); on a CPU alone, since an accelerator would be awaited.
    """
    return [(version(tensor), _some(tensor)) for tensor in tensors]


def are_changed(tensors: Sequence[torch.Tensor], before: Sequence[Mark]) -> bool:
    """Return whether one of the same tensors has another mark by now."""
    import torch

    for tensor, (writes, some) in zip(tensors, before, strict=True):
        if version(tensor) != writes:
            return True
        now = None if some is None else _some(tensor)
        if now is not None and not (
            now.shape == some.shape and torch.allclose(now, some, rtol=0, atol=0, equal_nan=True)
        ):
            return True
    return False


def _some(tensor: torch.Tensor) -> Any:
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not is_in_memory(tensor) or not tensor.numel():
        return None
    some = tensor.detach()
    if some.is_contiguous():
        return some.flatten()[:: max(1, tensor.numel() // FEW)].clone()
    for dim in range(some.ndim):  # flattening would copy all of it
        some = some.narrow(dim, 0, min(some.shape[dim], 4))
    return some.clone()
