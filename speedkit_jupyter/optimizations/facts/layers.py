"""What a layer is, and how its weight lies in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.memory_layout import weight_of

if TYPE_CHECKING:
    import torch


def is_convolution(module: torch.nn.Module) -> bool:
    """Whether this is a 2-D or 3-D convolution with a plain weight that can be laid out anew."""
    import torch

    convolution: Any = torch.nn.Conv2d.__base__
    return isinstance(module, convolution) and has_channels(module._parameters.get("weight"))


def has_channels(weight: torch.Tensor | None) -> bool:
    """Whether it has the dimensions of a 2-D or 3-D convolution's weight by now."""
    from torch.nn.parameter import is_lazy

    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether this is a linear layer that multiplies by itself: the last one of torch's attention
    only lends its weight.
    """
    import torch
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as Lending

    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Whether some parameter gets its shape at the first forward pass only."""
    import torch
    from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

    if isinstance(holder, torch.optim.Optimizer):
        return False
    tensors = (*holder.parameters(), *holder.buffers())
    return any(isinstance(tensor, UninitializedTensorMixin) for tensor in tensors)


def channels_last_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a 4-D or 5-D tensor of this shape with its channels last, in elements."""
    return _channels_last_stride(tuple(tensor.shape))


@lru_cache(maxsize=1024)
def _channels_last_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Whether the weight lies in memory with its channels last.

    By its strides: with one channel or a 1x1 kernel both layouts hold the same bytes in the same
    order, and yet torch's kernels choose by the strides.
    """
    weight = weight_of(convolution)
    return weight.stride() == channels_last_stride(weight)


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Its own or its class's; a module looks long for what it does not have."""
    return vars(module).get(name, getattr(type(module), name, None))
