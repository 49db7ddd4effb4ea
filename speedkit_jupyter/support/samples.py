"""Batches in whatever a call is given: how many samples, and some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedkit_jupyter.support.torch_private import tree_leaves

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


def cut(value: Any, length: int, samples: slice) -> Any:
    """Return these samples of what holds a value for each of `length`, in containers too."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor | np.ndarray):
        return value[samples] if value.ndim and len(value) == length else value
    if isinstance(value, Mapping):
        return {key: cut(one, length, samples) for key, one in value.items()}
    if isinstance(value, list | tuple):
        holds_tensors = length_of(value) is not None
        if len(value) == length and not holds_tensors:  # texts, say
            return value[samples]
        parts = [cut(one, length, samples) for one in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    return value
