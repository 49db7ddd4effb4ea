"""What the machine could do at best: floating-point operations and bytes per second, measured.

The limit of a step is the roofline of Williams, Waterman and Patterson (Communications of the
ACM 52(4), 2009): the larger of its operations over the fastest rate of large matrix products and
convolutions, and of the bytes of its state, which must be read at least once, over that of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from speedkit_jupyter.measure.rounds import clock

if TYPE_CHECKING:
    import torch

# The best of many calls and sizes is the machine's rate: what disturbs only makes it lower.
# Sizes grow until one call takes this long, each is repeated for at least so long.
LONG_ENOUGH_S, SPENT_S = 0.02, 0.05
COPIED_BYTES = 2**27


@dataclass(frozen=True)
class Peak:
    """Operations per second, of products or convolutions in one dtype; bytes per second."""

    flops_per_s: float
    bytes_per_s: float

    def limit_s(self, flops: int, moved_bytes: int) -> float:
        """Return the seconds that such a step takes at least."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


def peak(device: torch.device, dtype: torch.dtype, setting: str = "") -> Peak:
    """Measure it, once per session for each device, dtype and `setting` (tf32 and the like).

    The flags and threads that are in force count; call it inside the plan.
    """
    import torch

    return _peak(device, dtype, setting, torch.get_num_threads())


def flops(step: Callable[[], object], models: Sequence[torch.nn.Module] = ()) -> int:
    """Return the operations of a step by torch's counter: products, convolutions, attention.

    Kernels that the counter does not know are off: oneDNN's LSTM, fused encoders, CPU attention.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    parts = [part for model in models for part in model.modules()]
    mha, onednn = torch.backends.mha, cast("Any", torch.backends.mkldnn)
    with eager(), ExitStack() as stack:
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if all(p.device.type == "cpu" for part in parts for p in part.parameters()):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(isinstance(part, torch.nn.RNNBase) for part in parts):
                stack.callback(setattr, onednn, "enabled", onednn.enabled)
                onednn.enabled = False
        counter = stack.enter_context(FlopCounterMode(display=False))
        step()
    return int(counter.get_total_flops())


def eager() -> Any:
    """Compiled code runs as plain PyTorch, operation by operation, in this context."""
    import torch

    return torch.compiler.set_stance("force_eager")


@cache
def _peak(device: torch.device, dtype: torch.dtype, setting: str, threads: int) -> Peak:
    """Try products and convolutions: their kernels may use other engines."""
    import torch

    def make(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device, dtype=dtype)

    def product(size: int) -> tuple[int, Callable[[], object]]:
        a, out = make(size, size), make(size, size)
        return 2 * size**3, partial(torch.mm, a, a, out=out)

    def convolution(batch: int) -> tuple[int, Callable[[], object]]:
        shapes = (batch, 128, 28, 28), (128, 128, 3, 3)  # as in the middle of a ResNet
        given = [make(*shape).to(memory_format=torch.channels_last) for shape in shapes]
        return 2 * batch * 28**2 * 128**2 * 3**2, partial(torch.conv2d, *given, padding=1)

    best = 0.0
    for work, sizes in ((product, (512, 1024, 2048, 4096, 8192)), (convolution, (8, 64, 256))):
        for operations, call in map(work, sizes):
            seconds = _fastest_s(call, device)
            best = max(best, operations / seconds)
            if seconds >= LONG_ENOUGH_S:
                break
    source = torch.zeros(COPIED_BYTES, device=device, dtype=torch.uint8)
    copy = partial(torch.empty_like(source).copy_, source)
    return Peak(best, 2 * COPIED_BYTES / _fastest_s(copy, device))


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    best, end = float("inf"), time.perf_counter() + SPENT_S
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, clock.timed(call, device))
    return best
