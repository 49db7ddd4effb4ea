"""Cross entropy by what logits are made of: torch's own, a part of the rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.optimizations.heads.source import Source
from speedkit_jupyter.support.exceptions import SpeedKitError

# torch's own function would leave out what they are of the layer, without a word.
TWICE = "linear_cross_entropy has no second derivative (create_graph=True): leave it out"
FORMER = "size_average and reduce are of former times"


def cross_entropy(
    source: Source,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """As torch.nn.functional.cross_entropy of the logits; None where it can't be.

    In float32 at least: in half precision torch would round the loss itself, and this is none of
    the places where that is done.
    """
    import torch
    from torch.nn import functional

    why = FORMER if size_average is not None or reduce is not None else ""
    why = why or _why_not(source, target, label_smoothing)
    source.tell(why)
    if why:
        return None
    rows, exact = target.numel(), torch.promote_types(source.cast, torch.float32)
    features, matrix, *bias = (part.to(exact) for part in source.parts)
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=max(1, -(-rows // source.chunks)), chunking_method=None
    )
    with (
        torch.autocast(features.device.type, enabled=False),
        _as_torch_says(target, len(matrix), ignore_index),
    ):
        loss = functional.linear_cross_entropy(
            features.reshape(rows, features.shape[-1]),
            matrix,
            target.flatten(),
            linear_bias=bias[0] if bias else None,
            weight=None if weight is None else weight.to(exact),
            reduction="sum" if reduction == "mean" else reduction,
            ignore_index=ignore_index,
            options=options,
        )
        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(_once)
        if reduction == "mean":
            loss = _mean(loss, target, weight, ignore_index)
    if not torch.is_autocast_enabled(features.device.type):
        loss = loss.to(source.dtype)
    return loss.view(target.shape) if reduction == "none" else loss


@contextmanager
def _as_torch_says(target: Any, classes: int, ignore_index: int) -> Iterator[None]:
    """The error for a target that is no class is cross_entropy's own, by which code may go. (On a
    GPU both end in an assertion on the device.)
    """
    try:
        yield
    except (IndexError, RuntimeError):
        if target.device.type != "cpu":
            raise
        wrong = target[((target >= classes) | (target < 0)) & (target != ignore_index)]
        if not len(wrong):
            raise
        raise IndexError(f"Target {wrong[0]} is out of bounds.") from None


def _mean(total: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    """Over the targets that count. Of none it is no number, and has no gradients."""
    import torch

    counted = target != ignore_index
    if weight is None:
        number = counted.sum()
    else:
        number = (weight[torch.where(counted, target, 0)] * counted).sum()
    nothing = torch.where(number == 0, float("nan"), 0.0)
    return total / torch.where(number == 0, 1, number) + nothing


def _once(gradients: Any) -> None:
    import torch

    if torch.is_grad_enabled():
        raise SpeedKitError(TWICE)


def _why_not(source: Source, target: Any, smoothing: float) -> str:
    import torch

    before = source.features.shape[:-1]
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        return "targets are no class indices"
    if tuple(target.shape) != tuple(before) or not before.numel():
        return "targets are not one for each row"
    if len(before) > 1 and source.at == -1:
        return "classes are not the second dimension"
    if smoothing:
        return "labels are smoothed"
    return "" if torch.is_grad_enabled() else "no gradients are recorded"
