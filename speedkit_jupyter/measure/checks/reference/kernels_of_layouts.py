"""What torch's own float32 kernels round to in the other memory layout, as a control.

A kernel may round far more coarsely there than float32 has to: batch norm in channels_last adds
up each channel's numbers one after the other on a CPU, so that all of a channel is off together by
a thousand roundings. No number of digits brings that. So a control in float64 takes what this very
kernel makes of its operands, wherever float64 confirms that the kernel does nothing but round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What a kernel may be off by and be said to round, of all and of what lies at any one index: many
# thousand numbers added up one after the other bring so much, and no mistake is as small.
ROUNDS = 2.0**-10
# Of an index that is small beside the others, this share of what all may be off by.
OF_ALL = 0.1


def in_the_other_layout(function: Any, args: Any, kwargs: Any) -> Any:
    """An operation on images or volumes, as its float32 kernel in the other layout gives it.

    In channels_last where they are contiguous, and the other way round.
    """
    if "out" in kwargs or all(_other_layout(value) is None for value in args):
        return function(*args, **kwargs)
    low = [_in_float32(value) for value in args]  # before anything is written
    result = function(*args, **kwargs)
    with suppress(RuntimeError):  # an operation that has no such kernel
        other = function(*low, **kwargs)
        _take_over([result, *_written(function, args)], [other, *_written(function, low)])
    return result


def _other_layout(value: Any) -> torch.memory_format | None:
    """The other one of the layouts that a floating-point tensor may have."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    if last is None or value.layout is not torch.strided:
        return None
    is_last = value.is_contiguous(memory_format=last) and not value.is_contiguous()
    return torch.contiguous_format if is_last else last


def _in_float32(value: Any) -> Any:
    """A copy of its own, since operations may write what they are given."""
    import torch

    if isinstance(value, (list, tuple)):
        return type(value)(_in_float32(part) for part in value)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    dtype = torch.float32 if value.dtype is torch.float64 else value.dtype
    layout = _other_layout(value) or torch.preserve_format
    return value.detach().to(dtype, memory_format=layout, copy=True)


def _written(function: Any, args: Sequence[Any]) -> list[Any]:
    """What of its operands it changes in place: running statistics, say."""
    arguments = function._schema.arguments
    return [
        value
        for argument, value in zip(arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _take_over(results: Sequence[Any], others: Sequence[Any]) -> None:
    """What a kernel gave, into the results, of which each is judged by itself."""
    import torch

    for result, other in zip(results, others, strict=True):
        if isinstance(result, (list, tuple)):
            _take_over(result, other)
        elif (
            isinstance(result, torch.Tensor)
            and result.is_floating_point()
            and result.shape == other.shape
            and _only_rounds(other.to(result.dtype), result)
        ):
            result.copy_(other)


def _only_rounds(tensor: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether it is off by so little, in all and at each index of each dimension."""
    off, size = (tensor - exact) ** 2, exact**2
    if not bool(off.sum() <= ROUNDS**2 * size.sum()):
        return False
    least = OF_ALL**2 * size.mean()
    for dimension in range(exact.dim()) if exact.dim() > 1 else ():
        axes = [axis for axis in range(exact.dim()) if axis != dimension]
        if not bool((off.mean(axes) <= ROUNDS**2 * size.mean(axes).clamp_min(least)).all()):
            return False
    return True
