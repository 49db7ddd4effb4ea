"""Batches in whatever a call is given: how many samples, and some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.torchglue.private import tree_leaves

if TYPE_CHECKING:
    import torch

EMPTY = "the loader gives no batch: its data set is empty, or drop_last leaves nothing"


def length_of(value: Any) -> int | None:
    """Return the first dimension of the first tensor in it that has one."""
    import numpy as np
    import torch

    kinds = (torch.Tensor, np.ndarray)
    # A mapping of a library's own, transformers' BatchEncoding, say, is a leaf else.
    plain = dict(value) if isinstance(value, Mapping) else value
    tensors = (leaf for leaf in tree_leaves(plain) if isinstance(leaf, kinds))
    return next((len(leaf) for leaf in tensors if leaf.ndim), None)


def each_taken(value: Any, length: int, take: Callable[[Any], Any]) -> Any:
    """Return `take` of all tensors, arrays and lists of texts with `length` samples, in containers
    too; the rest as it is.
    """
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor | np.ndarray):
        return take(value) if value.ndim and len(value) == length else value
    if isinstance(value, Mapping):
        return {key: each_taken(one, length, take) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == length and length_of(value) is None:  # texts, say
            return take(value)
        parts = [each_taken(one, length, take) for one in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors within containers."""
    import torch

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
