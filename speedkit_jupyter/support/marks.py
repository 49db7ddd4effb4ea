"""Whether a tensor was written to, as far as its version and a few of its numbers tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# So many numbers of each.
FEW = 256

Mark = tuple[int, Any]


def marks(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """As they are now. Numbers count beside versions, since not everything that writes raises them
    (`.data`, fused optimizers); on a CPU alone, since an accelerator would be waited for.
    """
    return [(version(tensor), _some(tensor)) for tensor in tensors]


def are_changed(tensors: Sequence[torch.Tensor], before: Sequence[Mark]) -> bool:
    """Whether one of the same tensors has another mark by now."""
    for tensor, (writes, some) in zip(tensors, before, strict=True):
        if version(tensor) != writes:
            return True
        now = None if some is None else _some(tensor)
        if now is not None and not _are_equal(now, some):
            return True
    return False


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def version(tensor: torch.Tensor) -> int:
    """How often it was written to, as torch counts; 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _some(tensor: torch.Tensor) -> Any:
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not is_in_memory(tensor) or not tensor.numel():
        return None
    every = max(1, tensor.numel() // FEW)
    return tensor.detach().flatten()[::every].clone() if tensor.is_contiguous() else _rows(tensor)


def _rows(tensor: torch.Tensor) -> Any:
    """Of one whose numbers do not lie in order: to flatten it would copy all of them."""
    some = tensor.detach()
    for dim in range(some.ndim):
        some = some.narrow(dim, 0, min(some.shape[dim], 4))
    return some.clone()
