"""Measure the peak memory of a step; check whether copies of its state fit on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.torchglue import torch_profiler
from speedkit_jupyter.torchglue.private import is_profiled
from speedkit_jupyter.torchglue.storage import size_in_memory

# Copies of the state stay on the device only if this share of free memory is left.
LEAST_FREE = 0.5


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a step needs.

    `state_bytes` are the bytes of parameters, buffers, gradients and optimizer state before the
    step. `peak_bytes` adds the step's peak. It is None on MPS, and on CPUs under another profiler.
    """

    peak_bytes: int | None
    state_bytes: int


def needed(
    step: Callable[[], object], device: torch.device, state: Iterable[torch.Tensor]
) -> MemoryUse:
    """Run one step and return its memory use; `state` has the tensors from before the step."""
    held, kind = size(state), devices.named(device.type)
    peak = _peak_on_cpu(step) if device.type == "cpu" else kind.peak_bytes(step, device)
    return MemoryUse(None if peak is None else held + peak, held)


def _peak_on_cpu(step: Callable[[], object]) -> int | None:
    """Run the step; return its peak of allocated bytes, or None if another profiler is active."""
    if is_profiled():
        step()
        return None
    with torch_profiler.profiled(profile_memory=True) as trace:
        step()
    if not torch_profiler.was_alone(trace):
        return None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in events), initial=0)))


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of tensors, each counted once."""
    return sum({id(tensor): size_in_memory(tensor) for tensor in tensors}.values())


def state_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the parameters, buffers, gradients and tensors of optimizer state."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return tensors + [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]


def fits(copies_bytes: int, device: torch.device) -> bool:
    """Return whether copies leave LEAST_FREE of the device's free memory; True if unknown."""
    try:
        free, _ = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError):  # CPU and MPS share main memory; some XPU drivers fail
        return True
    return bool(copies_bytes <= (1 - LEAST_FREE) * free)
