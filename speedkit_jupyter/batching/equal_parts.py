"""Whether the losses of parts make that of the whole, tried on a few samples."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from speedkit_jupyter.batching.accumulated import Lost, loss_in
from speedkit_jupyter.batching.parts import Call
from speedkit_jupyter.measure.subject.discovery import outermost, reached
from speedkit_jupyter.measure.undo.kinds.process import process
from speedkit_jupyter.measure.undo.kinds.settings import Settings
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# So many parts are tried together; at the first call a few samples before that.
PARTS = 4
# As exactly as a mean in float32, or in half precision, is the same over parts.
CLOSE, CLOSE_IN_TF32, CLOSE_IN_HALF = 5e-6, 1e-3, 3e-2
RANDOM = "micro_batch: the loss draws random numbers, and was not checked"


def is_loss(function: Callable[..., Any], call: Call) -> bool:
    """Whether it gives one number for a batch, seen with two samples."""
    part = call.part(0, min(2, call.length))
    with suppress(Exception):  # what the trial writes to is a copy, where there can be one
        part = copy.deepcopy(part)
    with _aside(function):
        return _tried(lambda: loss_in(part.run(function))) is not None


def has_graph(result: Any) -> bool:
    """Whether a tensor in it keeps what it was computed from."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf))
    return any(tensor.grad_fn is not None for tensor in tensors)


def check(lost: Lost, call: Call, size: int) -> bool:
    """Raises StepError where they don't; warns where the loss is random, so that nobody can say.

    Some parts are tried, without gradients: a loss may go by how many samples there are. Whether
    it is about parts that weigh more than their samples: with targets that do not count.
    """
    import torch

    few = call.spread(min(call.length, PARTS * size))
    try:
        return _check(lost, few, min(size, max(few.length // 2, 1)))
    except torch.OutOfMemoryError:
        few = call.spread(min(call.length, PARTS))
        return _check(lost, few, max(few.length // 2, 1))


def _check(lost: Lost, few: Call, size: int) -> bool:
    number = few.length
    with _aside(lost.function):
        (whole, _), (again, _) = (_tried(lambda: lost(few, still=True)) for _ in range(2))
        cut = [*few.parts(size)]
        parts = [_tried(lambda one=one: lost(one, still=True)) for one in cut]  # type: ignore[misc]
    made, expected = _together(parts), _number(whole)
    each = {w / one.length for (_, w), one in zip(parts, cut, strict=True) if w is not None}
    is_uneven = len(each) > 1
    if math.isnan(expected):  # all of the few are ignored: nothing to compare
        return False
    if expected != _number(again):
        warnings.warn(RANDOM, stacklevel=6)
        return True
    largest = max(abs(expected), abs(made), *(abs(_number(loss)) for loss, _ in parts), 1e-6)
    if not abs(made - expected) <= _close(few) * largest:
        raise StepError(
            f"the losses of parts don't make that of the batch ({made:.4g}, and {expected:.4g} of "
            f"{number} samples at once): it is no mean over samples. A sum needs reduction='sum'; "
            "a mean over something else (a mask) needs weight=…, which says over how much"
        )
    return is_uneven


def _tried(call: Callable[[], T]) -> T:
    """Without gradients; with them where the loss itself asks for some (a penalty on gradients)."""
    import torch

    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        with torch.enable_grad():
            return call()


def _together(parts: list[tuple[Any, float | None]]) -> float:
    if any(weight is None for _, weight in parts):
        return sum(_number(loss) for loss, _ in parts)
    counted = [(_number(loss), weight) for loss, weight in parts if weight]
    return sum(loss * weight for loss, weight in counted) / (sum(w for _, w in counted) or math.nan)


def _number(loss: Any) -> float:
    return float(getattr(loss, "detach", lambda: loss)())


def batch_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that train."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [one for one in model.modules() if isinstance(one, _BatchNorm) and one.training]


@contextmanager
def _aside(function: Callable[..., Any]) -> Iterator[None]:
    """Without gradients or statistics of batches; random numbers and buffers are as before
    afterwards.
    """
    import torch

    models = outermost(reached([function]))
    buffers = [buffer for model in models for buffer in model.buffers()]
    copies = [buffer.clone() for buffer in buffers]
    randomness = Settings(process.generators())
    norms = [module for model in models for module in batch_norms(model)]
    with torch.no_grad():
        try:
            for norm in norms:
                norm.training = False
            yield
        finally:
            for norm in norms:
                norm.training = True
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
            list(randomness.restore())


def _close(call: Call) -> float:
    """By the least exact numbers that may be in it."""
    import torch
    from torch.utils._pytree import tree_leaves

    if _in_half(call):
        return CLOSE_IN_HALF
    given = tree_leaves([call.arguments, dict(call.named)])
    on_gpu = any(torch.is_tensor(one) and one.device.type != "cpu" for one in given)
    full = torch.get_float32_matmul_precision() == "highest"
    in_tf32 = not full or (on_gpu and torch.backends.cudnn.allow_tf32)
    return CLOSE_IN_TF32 if in_tf32 else CLOSE


def _in_half(call: Call) -> bool:
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves([call.arguments, dict(call.named)])
    halves = (torch.float16, torch.bfloat16)
    return any(torch.is_tensor(leaf) and leaf.dtype in halves for leaf in leaves) or any(
        torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")
    )
