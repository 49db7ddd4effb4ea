"""How much memory there is for a step, and what running out of it looks like."""

from __future__ import annotations

import gc
import re
import traceback
from typing import TYPE_CHECKING

from speedkit_jupyter.machines import devices

if TYPE_CHECKING:
    import torch

# So much of what is free stays so.
MARGIN = 0.1
# What torch's allocators say (c10/core/impl/alloc_cpu.cpp, cuDNN, cuBLAS).
SAYS_SO = re.compile(
    r"not enough memory|can't allocate memory|out of memory|CUDNN_STATUS_ALLOC_FAILED|"
    r"CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it was raised for want of memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SAYS_SO.search(str(error)))


def let_go(error: BaseException) -> None:
    """Nothing of what the failed step held is kept by its traceback."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    devices.release_cached()


def free_bytes(device: torch.device) -> int | None:
    """What may be allocated on the device, what torch keeps for later included; None where nobody
    says.
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
