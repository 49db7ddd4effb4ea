"""How far a step is off another one: in all, and in the ways in which rounding is not.

Rounding scatters. What it does to a tensor has hardly a direction along it (`slope`) or a sign
(`shift`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.values.magnitudes import LARGE, tamed

if TYPE_CHECKING:
    import torch


# Near float32's smallest numbers kernels give zero or not.
NOTHING = 1e-37
# What a tensor's gradient is off by counts relative to this share of the whole one's at least.
LEFT_OF_ZERO = 1e-4
# And to this much: Adam adds 1e-8 to what it divides by.
LEAST_GRADIENT = 1e-12
NAMES = ("off", "scaled", "shifted")


@dataclass(frozen=True)
class Deviation:
    """Of one tensor with `size` elements, each relative to the reference.

    `distance`: norm of the difference over the norm of the reference. `slope`: the regression
    coefficient of the difference on the reference. `shift`: the mean difference over the root mean
    square of the reference. `drowned` is whether the difference is larger than the reference:
    of what is zero in theory rounding leaves anything.
    """

    size: int
    distance: float = 0.0
    slope: float = 0.0
    shift: float = 0.0
    drowned: bool = False

    def values(self) -> tuple[float, ...]:
        """What is off, in the order of NAMES."""
        return self.distance, self.slope, self.shift


def deviation(tensor: torch.Tensor, reference: torch.Tensor, least: float = NOTHING) -> Deviation:
    """Of float64 tensors of one shape; infinite where the reference is zero and this is not.

    It is relative to a root mean square of `least` at least.
    """
    difference, count = tensor - reference, reference.numel()
    norm, off = float(reference.norm()), float(difference.norm())
    if max(norm, off) > LARGE and (smaller := tamed([(tensor, reference)])[0])[1] is not reference:
        return deviation(*smaller, least)
    if not off or max(norm, float(tensor.norm())) < NOTHING * count**0.5:
        return Deviation(count)
    drowned = off > norm
    if least > NOTHING:
        norm = max(norm, least * count**0.5)
    if not norm:
        infinite = float("inf")
        return Deviation(count, infinite, infinite, infinite)
    size = norm / count**0.5
    return Deviation(
        count,
        off / norm,
        abs(float((difference * reference).sum())) / norm**2,
        abs(float(difference.mean())) / size,
        drowned=drowned,
    )


def pooled(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], least: float = NOTHING) -> Deviation:
    """Distance and slope of all of them together, relative to a root mean square of `least` at
    least: what is smaller may be the noise of a signal that died on its way through the net.
    """
    off = along = total = 0.0
    for tensor, reference in tamed(pairs):
        difference = tensor - reference
        off += float(difference.norm()) ** 2
        along += float((difference * reference).sum())
        total += float(reference.norm()) ** 2
    count = sum(reference.numel() for _, reference in pairs)
    total = max(total, least**2 * count)
    if total == 0:
        return Deviation(count, 0.0 if off == 0 else float("inf"))
    return Deviation(count, (off / total) ** 0.5, abs(along) / total)


def least_gradient(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Gradients so much smaller than the others may be what rounding left of a zero."""
    return max(LEAST_GRADIENT, LEFT_OF_ZERO * root_mean_square(pairs))


def root_mean_square(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of all references."""
    count = sum(reference.numel() for _, reference in pairs)
    return math.sqrt(sum(float(reference.norm()) ** 2 for _, reference in pairs) / max(count, 1))
