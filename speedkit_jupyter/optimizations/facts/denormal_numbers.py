"""How much of what a model and its optimizers hold is denormal, by a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from speedkit_jupyter.support.storage import is_whole

if TYPE_CHECKING:
    import torch

# So many of each tensor, evenly: some 2 ms for a model of hundreds.
NUMBERS = 256


def share(tensors: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """From 0 to 1, of the float32 and float64 numbers in plain tensors on the CPU; 0 without any.

    Takes none for denormal where the thread itself takes them for zero.
    """
    import torch

    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    seen = denormal = 0
    # No mode of the user's is asked: to it this would be the user's own computing.
    modes_off = getattr(torch._C, "_DisableTorchDispatch", nullcontext)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), modes_off():
        for tensor in filter(_can_be_read, (*tensors, *_states(optimizers))):
            number = tensor.numel()
            stride = number // NUMBERS | 1  # odd: rows mostly have an even length
            numbers = tensor.as_strided(((number - 1) // stride + 1,), (stride,))
            samples.setdefault(tensor.dtype, []).append(numbers)
        for dtype, parts in samples.items():
            sizes = torch.cat(parts).abs()
            seen += sizes.numel()
            denormal += int(((sizes > 0) & (sizes < torch.finfo(dtype).tiny)).sum())
    return denormal / seen if seen else 0.0


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """What optimizers keep for each number of their parameters."""
    import torch

    for optimizer in optimizers:
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from (value for value in values if isinstance(value, torch.Tensor))


def _can_be_read(tensor: torch.Tensor) -> bool:
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return (
        plain
        and tensor.is_cpu
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel() > 1
        and tensor.is_contiguous()
        and is_whole(tensor)
    )
