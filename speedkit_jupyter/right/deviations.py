"""Measure how far tensors deviate from a reference: norm, scale and bias.

Rounding errors scatter: they hardly scale a tensor (`scale`) or shift it (`bias`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from speedkit_jupyter.machines import devices

# A tensor and its reference; None means zeros, because a step may omit a zero gradient.
Pair = tuple[torch.Tensor | None, torch.Tensor | None]

# Differences with a smaller root mean square count as zero: some kernels round them to zero.
NOTHING = 1e-37
# A gradient is compared relative to at least this share of the root mean square of all gradients.
# Smaller gradients may be rounded zeros, as for a bias before a batch norm.
LEFT_OF_ZERO = 1e-4
# A gradient is also compared relative to at least this value, far below Adam's eps (1e-8).
LEAST_GRADIENT = 1e-12


class Deviation(NamedTuple):
    """The relative deviation of a tensor from its reference.

    `distance` is the norm of the difference ÷ the norm of the reference. `scale` is the absolute
    coefficient in a regression of the difference on the reference. `bias` is the absolute mean
    difference ÷ the root mean square of the reference.
    """

    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0


class Sums(NamedTuple):
    """Sums over `size` elements of a tensor and its reference.

    `off` sums the squares of the difference, `square` the squares of the reference, `product` the
    products of difference and reference, and `shift` the difference itself.
    """

    size: int
    off: float = 0.0
    square: float = 0.0
    product: float = 0.0
    shift: float = 0.0

    @property
    def mean(self) -> float:
        return math.sqrt(self.square / max(self.size, 1))

    def deviation(self, least: float = 0.0) -> Deviation:
        """Return the deviation relative to the reference's root mean square or a larger `least`."""
        square = max(self.square, least**2 * self.size)
        if self.off <= NOTHING**2 * self.size:
            return Deviation()
        if not square:
            return Deviation(math.inf, math.inf, math.inf)
        bias = abs(self.shift) / math.sqrt(square * self.size)
        return Deviation(math.sqrt(self.off / square), abs(self.product) / square, bias)

    def along(self, way: float, dtype: torch.dtype) -> Sums:
        """Return sums that compare the difference, minus rounding, with a change of norm `way`."""
        if not math.isfinite(self.off):
            return self
        # Differences of up to four eps of the dtype (at least float32's) are roundings.
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        off = max(0.0, math.sqrt(self.off) - 4 * eps * math.sqrt(self.square))
        return Sums(self.size, off * off, way * way)


def total(parts: Sequence[Sums]) -> Sums:
    return Sums(*map(sum, zip(*parts, strict=True))) if parts else Sums(0)


def sums(pairs: Sequence[Pair]) -> list[Sums]:
    """Return the sums of each pair, computed on the pair's device, and transferred together."""
    found = [Sums(max(0 if one is None else one.numel() for one in pair)) for pair in pairs]
    left = [i for i, pair in enumerate(pairs) if found[i].size and pair[0] is not pair[1]]
    # float32 takes a thirtieth of float64's time and is precise enough, but squares may overflow.
    for wide, masked in ((False, False), (True, False), (True, True)):
        rows = [_row(*pairs[i], wide, masked) for i in left]
        values = torch.stack([row.to(rows[0]) for row in rows]).tolist() if rows else []
        for i, row in zip(left, values, strict=True):
            found[i] = Sums(found[i].size, *row)
        least = 0.0 if wide else 1e-30  # smaller squares may be denormal in float32
        left = [i for i in left if not (all(map(math.isfinite, found[i])) and found[i][2] >= least)]
    return found


def _row(
    tensor: torch.Tensor | None, reference: torch.Tensor | None, wide: bool, masked: bool
) -> torch.Tensor:
    """Return a pair's sums. `wide` uses float64 if possible; `masked` skips equal inf and NaN."""
    there = next(one for one in (tensor, reference) if one is not None)
    first, second = (torch.zeros_like(there) if x is None else x for x in (tensor, reference))
    if first.is_complex() or second.is_complex():
        first, second = (torch.view_as_real(x.resolve_conj()) for x in (first, second))
    kind = devices.kind_of(there.device.type)
    dtype = torch.float64 if wide and (kind is None or kind.has_float64) else None
    # Chunks of a megabyte stay in the CPU's cache from the difference to the last sum.
    size = 2**18 if there.device.type == "cpu" else max(there.numel(), 1)
    pieces = zip(first.reshape(-1).split(size), second.reshape(-1).split(size), strict=True)
    return torch.stack([_of_piece(*pair, dtype, masked) for pair in pieces]).sum(0)


def _of_piece(
    first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype | None, masked: bool
) -> torch.Tensor:
    if first.dtype in (torch.float16, torch.bfloat16):
        first = first.float()
    difference = first - second
    if masked:
        known = ((first == second) | (first.isnan() & second.isnan())) & ~second.isfinite()
        difference, second = difference.masked_fill(known, 0), second.masked_fill(known, 0)
    norms = [torch.linalg.vector_norm(x, dtype=dtype) ** 2 for x in (difference, second)]
    shift = difference.sum(dtype=dtype)
    product = difference.mul_(second).sum(dtype=dtype)
    return torch.stack([*norms, product, shift])


def of_gradients(parts: Mapping[str, Sums]) -> list[Deviation]:
    """Return the deviation of each gradient or state change, relative to its reference.

    A reference that is almost zero in its module is replaced by the module's root mean square.
    """
    mean = total([*parts.values()]).mean
    least = max(LEAST_GRADIENT, LEFT_OF_ZERO * mean) if math.isfinite(mean) else 0.0
    modules: dict[str, list[Sums]] = {}
    for name, part in parts.items():
        modules.setdefault(name.rpartition(".")[0], []).append(part)
    means = {module: total(each).mean for module, each in modules.items()}
    found = []
    for name, part in parts.items():
        of_module = means[name.rpartition(".")[0]]
        is_zero = part.mean < LEFT_OF_ZERO * of_module < math.inf
        found.append(part.deviation(max(of_module, least) if is_zero else least))
    return found
