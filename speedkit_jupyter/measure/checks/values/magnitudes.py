"""Norms and squares of float64 tensors that neither overflow nor meet what is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

# The square of what is larger may be infinite.
LARGE = 1e100


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm, whatever its square would be."""
    length = float(tensor.norm())
    if length <= LARGE:
        return length
    size = largest(tensor)
    return float((tensor / size).norm()) * size if size else length


def tamed(pairs: Pairs) -> Pairs:
    """All divided by one number where a square would be infinite; else as they are."""
    if all(float(tensor.norm()) <= LARGE for pair in pairs for tensor in pair):
        return pairs
    size = max(largest(tensor) for pair in pairs for tensor in pair)
    return pairs if size <= LARGE else [(mine / size, theirs / size) for mine, theirs in pairs]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of it is: so is the sum then, but for very large numbers."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def of_finite(tensor: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with zeros where they are infinite or NaN alike: a mask, say."""
    import torch

    if is_finite(reference):
        return tensor, reference
    alike = ~reference.isfinite() & ((tensor == reference) | (tensor.isnan() & reference.isnan()))
    zero = torch.zeros((), dtype=reference.dtype)
    return torch.where(alike, zero, tensor), torch.where(alike, zero, reference)
