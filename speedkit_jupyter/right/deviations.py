"""Deviations of tensors from others by norm, scale and bias, and the share that rounding explains.

Rounding scatters: its change of a tensor has hardly a direction along it (`scale`) or a sign
(`bias`). A control is the same step, rounded to the variant's precision. Of 30 nets
(MLPs, CNNs, recurrent, transformers), in training and in evaluation, real autocast was off by 0.5
to 1.5 times as much as its control in every output, in gradients by up to 6 times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speedkit_jupyter.machines import devices

if TYPE_CHECKING:
    Pair = tuple[torch.Tensor | None, torch.Tensor | None]

# Near float32's smallest numbers some kernels give zero.
NOTHING = 1e-37
# A gradient is compared relative to this share of the root mean square of all gradients at least:
# a smaller one may be what rounding left of a zero, as in a bias before a batch norm.
LEFT_OF_ZERO = 1e-4
# And to this much at least: it is less than what Adam adds to what it divides by (1e-8), squared.
LEAST_GRADIENT = 1e-12


class Deviation(NamedTuple):
    """The norm of the difference over the reference's norm; the regression coefficient of the
    difference on the reference; the mean difference over the reference's root mean square.
    """

    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0


class Sums(NamedTuple):
    """Of `size` elements: squares of the difference and of the reference, their product, and the
    sum of the difference.
    """

    size: int
    off: float = 0.0
    square: float = 0.0
    product: float = 0.0
    shift: float = 0.0

    def deviation(self, least: float = 0.0) -> Deviation:
        """Return it relative to the reference, or to a root mean square of `least` if larger."""
        square = max(self.square, least**2 * self.size)
        if self.off <= NOTHING**2 * self.size:
            return Deviation()
        if not square:
            return Deviation(math.inf, math.inf, math.inf)
        bias = abs(self.shift) / math.sqrt(square * self.size)
        return Deviation(math.sqrt(self.off / square), abs(self.product) / square, bias)


def total(parts: Sequence[Sums]) -> Sums:
    """Return the sums of several tensors together."""
    return Sums(*map(sum, zip(*parts, strict=True))) if parts else Sums(0)


def sums(pairs: Sequence[Pair]) -> list[Sums]:
    """Reduce each pair of a tensor and its reference on its device; one transfer for all.

    None means zeros: a step may or may not make a gradient of zeros.
    """
    found = [Sums(max(0 if one is None else one.numel() for one in pair)) for pair in pairs]
    left = [i for i, pair in enumerate(pairs) if found[i].size and pair[0] is not pair[1]]
    # Float32 takes a thirtieth of the time and has digits enough, but not enough of a range.
    for wide, masked in ((False, False), (True, False), (True, True)):
        rows = [_row(*pairs[i], wide, masked) for i in left]
        values = torch.stack([row.to(rows[0]) for row in rows]).tolist() if rows else []
        for i, row in zip(left, values, strict=True):
            found[i] = Sums(found[i].size, *row)
        least = 0.0 if wide else 1e-30  # smaller squares may have lost digits in float32
        left = [i for i in left if not (all(map(math.isfinite, found[i])) and found[i][2] >= least)]
    return found


def _row(
    tensor: torch.Tensor | None, reference: torch.Tensor | None, wide: bool, masked: bool
) -> torch.Tensor:
    """Add up in float64 if `wide`; with `masked` what is infinite or NaN in both is alike."""
    there = next(one for one in (tensor, reference) if one is not None)
    first, second = (torch.zeros_like(there) if x is None else x for x in (tensor, reference))
    if first.is_complex() or second.is_complex():
        first, second = (torch.view_as_real(x.resolve_conj()) for x in (first, second))
    kind = devices.kind_of(there.device.type)
    dtype = torch.float64 if wide and (kind is None or kind.has_float64) else None
    # A megabyte at once stays in a CPU's cache, from the difference to its last sum.
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
    """Return each relative to its reference, or to a small share of all gradients; a gradient that
    is zero next to its module's others relative to these.
    """
    mean = _mean(total([*parts.values()]))
    least = max(LEAST_GRADIENT, LEFT_OF_ZERO * mean) if math.isfinite(mean) else 0.0
    modules: dict[str, list[Sums]] = {}
    for name, part in parts.items():
        modules.setdefault(name.rpartition(".")[0], []).append(part)
    around = {module: _mean(total(each)) for module, each in modules.items()}
    found = []
    for name, part in parts.items():
        of_module = around[name.rpartition(".")[0]]
        is_zero = _mean(part) < LEFT_OF_ZERO * of_module < math.inf
        found.append(part.deviation(of_module if is_zero else least))
    return found


def _mean(part: Sums) -> float:
    """Return the root mean square of a reference."""
    return math.sqrt(part.square / max(part.size, 1))


def has_finite(value: Any) -> bool:
    """Return whether any element is; a sum is far cheaper than to ask of each."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().any())


def of_way(part: Sums, tensor: Any, way: float) -> Sums:
    """Return the sums relative to the way that a parameter went, without its dtype's rounding."""
    eps = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
    if not math.isfinite(part.off):
        return part
    # A parameter that is off by four roundings of its dtype is where it should be.
    off = max(0.0, math.sqrt(part.off) - 4 * eps * math.sqrt(part.square))
    return Sums(part.size, off * off, way * way)
