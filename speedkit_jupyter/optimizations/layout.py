"""Tensors laid out anew in place: the same object, the same values, other strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def restride(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Give `tensor` these strides; its object, values and dtype stay. No-op where it has them."""
    import torch

    if tensor.stride() == stride:
        return
    laid_out = torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor.detach())
    tensor.data = laid_out


def owns_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the memory is this tensor's alone: no flat buffer, and no other process's too."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # model.share_memory()
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def followers(
    parameter: torch.nn.Parameter, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """The tensors that must lie like their parameter: its gradient and its optimizer state.

    Fused optimizers walk all of them by one index, so a state in another layout silently
    belongs to other weights.
    """
    import torch

    if parameter.grad is not None and parameter.grad.layout == torch.strided:
        yield parameter.grad
    for optimizer in optimizers:
        state = optimizer.state.get(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                yield value
