"""Samples for a batch of any size, made of those that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedkit_jupyter.support.samples import length_of


def resized(value: Any, number: int) -> Any:
    """So many samples: the first ones, or all of them over and over."""
    length = length_of(value)
    return value if length is None else _resized(value, length, number)


def _resized(value: Any, length: int, number: int) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if not value.ndim or len(value) != length:
            return value
        return _like(value, value.detach()[torch.arange(number, device=value.device) % length])
    if isinstance(value, np.ndarray):
        same = value.ndim and len(value) == length
        return value[np.arange(number) % length] if same else value
    if isinstance(value, Mapping):
        return {key: _resized(one, length, number) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == length and length_of(value) is None:
            return type(value)(value[at % length] for at in range(number))
        parts = [_resized(one, length, number) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _like(value: Any, samples: Any) -> Any:
    """With the memory layout of the tensor (channels_last, say), and its gradient."""
    import torch

    if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
        samples = samples.contiguous(memory_format=torch.channels_last)
    return samples.requires_grad_(value.requires_grad)
