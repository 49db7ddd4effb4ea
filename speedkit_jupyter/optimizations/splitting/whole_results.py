"""Results of parts of a batch, put together as those of the whole: with their graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# As exactly as float32, or half precision, is the same for few samples and for many.
CLOSE, CLOSE_IN_HALF = 1e-3, 3e-2


class NotOfSamples(Exception):
    """A result whose parts don't make up the whole, and why."""


def together(results: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Every tensor joined along its first dimension. Raises NotOfSamples where that is not the
    samples', or where there is something else than tensors.
    """
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    flat = [tree_flatten(result) for result in results]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise NotOfSamples("parts give results of different structure")
    for (leaves, _), length in zip(flat, lengths, strict=True):
        for leaf in leaves:
            _check(leaf, length)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    whole = [None if column[0] is None else torch.cat(column) for column in columns]
    return tree_unflatten(whole, spec)


def _check(leaf: Any, length: int) -> None:
    import torch

    if leaf is None:
        return
    if not isinstance(leaf, torch.Tensor):
        raise NotOfSamples(
            f"what it gives holds {type(leaf).__name__} objects, which can't be joined"
        )
    if not leaf.ndim:
        raise NotOfSamples("it gives one number for the batch (a loss?)")
    if len(leaf) != length:
        raise NotOfSamples("the first dimension of what it gives is not the batch's")


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same within rounding."""
    from torch.utils._pytree import tree_leaves

    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(_is_close(a, b) for a, b in pairs if a is not None)


def _is_close(one: Any, other: Any) -> bool:
    import torch

    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = CLOSE if one.dtype in (torch.float32, torch.float64) else CLOSE_IN_HALF
    if torch.is_autocast_enabled(one.device.type):
        close = CLOSE_IN_HALF
    finite = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (torch.where(finite, part, 0).double() for part in (one, other))
    return bool((one - other).norm() <= close * max(float(one.norm()), float(other.norm())))
