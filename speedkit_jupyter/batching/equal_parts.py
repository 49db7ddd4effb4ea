"""Whether the losses of parts make that of the whole, tried on a few samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from speedkit_jupyter.batching.losses import Lost, loss_in
from speedkit_jupyter.batching.parts import Call
from speedkit_jupyter.measure.subject.discovery import outermost, reached
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.torch_private import tree_leaves

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# This many parts are tried together.
PARTS = 4
# How far a mean over parts may be off, relative to the largest loss. A wrong mean is off by far
# more; rounding is some 1e-7 in float32, 5e-4 in TF32, 8e-3 in bfloat16.
CLOSE, CLOSE_IN_TF32, CLOSE_IN_HALF = 5e-6, 1e-3, 3e-2
RANDOM = "micro_batch: the loss draws random numbers, and was not checked"


def is_loss(function: Callable[..., Any], call: Call) -> bool:
    """Return whether the function gives one number for a batch, tried with two samples."""
    part = call.part(0, min(2, call.length))
    with suppress(Exception):  # what the trial writes to is a copy, where there can be one
        part = copy.deepcopy(part)
    with _aside(function):
        return _tried(lambda: loss_in(part.run(function))) is not None


def check(lost: Lost, call: Call, size: int) -> bool:
    """Return whether parts weigh otherwise than by their samples; raises StepError where their
    losses don't make that of the whole.

    Some parts are tried, without gradients. Warns where the loss is random, so that nobody can say.
    """
    import torch

    few = call.spread(min(call.length, PARTS * size))
    try:
        return _check(lost, few, min(size, max(few.length // 2, 1)))
    except torch.OutOfMemoryError:
        few = call.spread(min(call.length, PARTS))
        return _check(lost, few, max(few.length // 2, 1))


def _check(lost: Lost, few: Call, size: int) -> bool:
    def tried(part: Call) -> tuple[float, float | None]:
        loss, weight = _tried(lambda: lost(part, still=True))
        return float(loss.detach()), weight

    with _aside(lost.function):
        whole, again, cut = tried(few), tried(few), [*few.parts(size)]
        parts = [tried(part) for part in cut]
    expected, made = whole[0], _together(parts)
    if math.isnan(expected):  # no target of the few counts: nothing to compare
        return False
    if expected != again[0]:
        messages.warn(RANDOM)
        return True
    largest = max(abs(expected), abs(made), *(abs(loss) for loss, _ in parts), 1e-6)
    if not abs(made - expected) <= _close(few) * largest:
        raise StepError(
            f"the losses of parts don't make that of the batch ({made:.4g}, and {expected:.4g} of "
            f"{few.length} samples at once): it is no mean over samples. A sum needs "
            "reduction='sum'; a mean over something else (a mask) needs weight=…, which says over "
            "how much"
        )
    weights = {w / one.length for (_, w), one in zip(parts, cut, strict=True) if w is not None}
    return len(weights) > 1


def _together(parts: list[tuple[float, float | None]]) -> float:
    if any(weight is None for _, weight in parts):
        return sum(loss for loss, _ in parts)
    counted = [(loss, weight) for loss, weight in parts if weight]
    return sum(loss * weight for loss, weight in counted) / (sum(w for _, w in counted) or math.nan)


def _tried(call: Callable[[], T]) -> T:
    """Call it without gradients; with them where the loss itself asks for some (a penalty)."""
    import torch

    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        with torch.enable_grad():
            return call()


def batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the BatchNorm modules that train."""
    from torch import nn

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [one for one in model.modules() if isinstance(one, kinds) and one.training]


@contextmanager
def _aside(function: Callable[..., Any]) -> Iterator[None]:
    """Run the block without gradients or statistics of batches; random numbers and buffers are put
    back.
    """
    import random

    import numpy as np
    import torch

    models = outermost(reached([function]))
    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    norms = [module for model in models for module in batch_norms(model)]
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    with torch.no_grad(), torch.random.fork_rng():
        try:
            for norm in norms:
                norm.training = False
            yield
        finally:
            for norm in norms:
                norm.training = True
            for buffer, value in buffers:
                buffer.copy_(value)
            random.setstate(python)
            np.random.set_state(numpy)


def _close(call: Call) -> float:
    """Return the tolerance of the least exact numbers that may be in it."""
    import torch

    halves = (torch.float16, torch.bfloat16)
    tensors = [
        one for one in tree_leaves([call.arguments, dict(call.named)]) if torch.is_tensor(one)
    ]
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if autocast or any(tensor.dtype in halves for tensor in tensors):
        return CLOSE_IN_HALF
    on_gpu = any(tensor.device.type != "cpu" for tensor in tensors)
    in_tf32 = torch.get_float32_matmul_precision() != "highest"
    return CLOSE_IN_TF32 if in_tf32 or (on_gpu and torch.backends.cudnn.allow_tf32) else CLOSE
