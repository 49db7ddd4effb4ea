"""Batches in the arguments of a call: their length, and selections of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.torchglue.private import tree_leaves


def length_of(value: Any) -> int | None:
    """Return the length of the first tensor or array in `value` that has a dimension."""
    # torch would treat a library's mapping, such as transformers' BatchEncoding, as a leaf.
    plain = dict(value) if isinstance(value, Mapping) else value
    tensors = (leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor | np.ndarray))
    return next((len(leaf) for leaf in tensors if leaf.ndim), None)


def lengths_of(value: Any) -> list[int]:
    """Return the possible numbers of samples in `value`.

    Similar tensors in a list may be samples or parts of a batch; then both numbers are returned.
    """
    if _are_alike(value):
        first, *others = map(length_of, value)
        is_sure = isinstance(value[0], Mapping) or any(one != first for one in others)
        return [len(value)] if is_sure else [first or 0, len(value)]
    parts = value.values() if isinstance(value, Mapping) else value
    found = map(lengths_of, parts) if isinstance(value, Mapping | list | tuple) else ()
    number = length_of(value)
    return min(filter(None, found), key=len, default=[] if number is None else [number])


def _are_alike(value: Any) -> bool:
    """Return whether the value is a list of mappings, or of tensors of one dtype and rank."""
    if not isinstance(value, list | tuple) or len(value) < 2 or hasattr(value, "_fields"):
        return False
    kinds = {(type(one), getattr(one, "dtype", None), getattr(one, "ndim", 0)) for one in value}
    return len(kinds) == 1 and (isinstance(value[0], Mapping) or getattr(value[0], "ndim", 0) > 0)


def each_taken(value: Any, length: int, take: Callable[[Any], Any]) -> Any:
    """Return `value` with `take` applied to each batch of `length` samples in it.

    Batches are tensors, arrays, and lists of texts or of other samples, also inside containers.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return take(value) if value.ndim and len(value) == length else value
    if isinstance(value, Mapping):
        return {key: each_taken(one, length, take) for key, one in value.items()}
    if isinstance(value, list | tuple):
        are_samples = length_of(value) is None or (  # a list of texts, for example, or of pictures
            _are_alike(value) and lengths_of(value) != [length, length]
        )
        if len(value) == length and are_samples:
            return take(value)
        parts = [each_taken(one, length, take) for one in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    return value
