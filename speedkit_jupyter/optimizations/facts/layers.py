"""What a layer is, how its weight lies in memory, and what `rewrites` can put in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.calls import is_watched
from speedkit_jupyter.optimizations.properties.tensors import weight_of

if TYPE_CHECKING:
    import torch

# The groups of a GroupNorm in the place of an InstanceNorm2d.
GROUPS = 8


def is_convolution(module: torch.nn.Module) -> bool:
    """Return whether this is a 2-D or 3-D convolution whose weight can be laid out anew."""
    import torch

    convolution: Any = torch.nn.Conv2d.__base__
    return isinstance(module, convolution) and has_channels(module._parameters.get("weight"))


def has_channels(weight: torch.Tensor | None) -> bool:
    """Return whether it has the dimensions of a 2-D or 3-D convolution's weight by now."""
    from torch.nn.parameter import is_lazy

    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether this is a linear layer that multiplies by itself: the last one of torch's
    attention only lends its weight.
    """
    import torch
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as Lending

    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Return whether some parameter gets its shape at the first forward pass only."""
    import torch
    from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

    if isinstance(holder, torch.optim.Optimizer):
        return False
    tensors = (*holder.parameters(), *holder.buffers())
    return any(isinstance(tensor, UninitializedTensorMixin) for tensor in tensors)


def channels_last_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a 4-D or 5-D tensor with its channels last, in elements."""
    return _channels_last_stride(tuple(tensor.shape))


@lru_cache(maxsize=1024)
def _channels_last_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Return whether the weight lies in memory with its channels last.

    By its strides: with one channel or a 1x1 kernel both layouts hold the same bytes in the same
    order, and yet torch's kernels choose by the strides.
    """
    weight = weight_of(convolution)
    return weight.stride() == channels_last_stride(weight)


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Return a module's attribute; `getattr` looks long for what there is not."""
    return vars(module).get(name, getattr(type(module), name, None))


def rewritable(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module, str]]:
    """Yield kind and path of each module that `rewrites` has another one for, with the module that
    holds it and its name there; a shared one once for each.
    """
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None and not is_watched(child) and (kind := _rewriting(child)):
                yield kind, f"{path}.{name}" if path else name, parent, name


def _rewriting(module: Any) -> str:
    from torch import nn

    theirs = getattr(sys.modules.get("transformers.activations"), "GELUActivation", None)
    if type(module) is nn.GELU and module.approximate == "none":
        return "gelu"
    if type(module) is theirs and module.__dict__.get("act") is nn.functional.gelu:
        return "gelu"
    is_norm = type(module) is nn.InstanceNorm2d and not module.num_features % GROUPS
    return "instance_norm" if is_norm and module.affine and not module.track_running_stats else ""
