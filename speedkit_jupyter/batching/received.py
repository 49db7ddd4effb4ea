"""What a call shows: how much the step's model receives in it, and whether memory ran out."""

from __future__ import annotations

import gc
import math
import re
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import tree_leaves

if TYPE_CHECKING:
    import torch

# From one batch size to another the model receives more by this share of the (logarithmic) growth,
# at the least: inputs that are the same for every size (a table, a mask) may come beside the batch.
GROWTH = 0.5
# What torch's allocators say (c10/core/impl/alloc_cpu.cpp, cuDNN, cuBLAS).
SAYS_SO = re.compile(
    r"not enough memory|can't allocate memory|out of memory|CUDNN_STATUS_ALLOC_FAILED|"
    r"CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def received(call: Callable[[], object]) -> int:
    """Make the call; return how many numbers all outermost modules in it were given."""
    import torch

    numbers, depth = 0, 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal numbers, depth
            if not depth:
                leaves = tree_leaves((args, kwargs))
                numbers += sum(one.numel() for one in leaves if isinstance(one, torch.Tensor))
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return called

    with patched(torch.nn.Module, "__call__", counting):
        call()
    return numbers


def operations(call: Callable[[], object]) -> int:
    """Make the call; return how many operations its products and convolutions took."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def grows(received: float, sizes: float) -> bool:
    """Return whether the model received so much more (or less) of one batch size than of another,
    each a ratio. Where nothing was counted, there is nothing to tell by.
    """
    return not received or math.log(received) / math.log(sizes) >= GROWTH


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it was raised for want of memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SAYS_SO.search(str(error)))


def let_go(error: BaseException) -> None:
    """Free what the failed step held: its traceback keeps none of it."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    devices.release_cached()


def free_bytes(device: torch.device) -> int | None:
    """Return what may be allocated on the device, with what torch keeps for later; None where
    nobody says.
    """
    import torch

    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    allocator = torch.get_device_module(device)
    if not hasattr(allocator, "mem_get_info"):
        return None
    free, _ = allocator.mem_get_info(device)
    kept = allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return int(free) + int(kept)
