"""Tensors beside others: of the same shape, strides and dtype, in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Twin:
    """One that is to be filled with values, again and again."""

    def __init__(self, tensor: torch.Tensor, needs_gradient: bool = False) -> None:
        import torch

        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        self._expanded = [d for d, (n, stride) in enumerate(sizes) if n > 1 and stride == 0]
        base = self._base_of(tensor)
        with torch.no_grad():
            self._base = torch.empty_strided(
                base.size(), base.stride(), dtype=tensor.dtype, device=tensor.device
            )
            self.tensor = self._base
            if self._expanded:
                self.tensor = self._base.expand(tensor.shape)
            self.tensor.requires_grad_(needs_gradient)

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """With these values. Autograd does not learn of it: it is as if a graph had done it."""
        import torch

        with torch.no_grad():
            self._base.data.copy_(self._base_of(tensor))
        return self.tensor

    def _base_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without what is there several times over in the same place."""
        tensor = tensor.detach()
        for dimension in self._expanded:
            tensor = tensor.narrow(dimension, 0, 1)
        return tensor


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    return Twin(tensor).fill(tensor)


def copies(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Of all at once: there may be hundreds."""
    import torch

    given = [tensor for tensor in tensors if tensor is not None]
    made = [torch.empty_like(tensor) for tensor in given]
    if made:
        with torch.no_grad():
            torch._foreach_copy_(made, given)
    each = iter(made)
    return [None if tensor is None else next(each) for tensor in tensors]
