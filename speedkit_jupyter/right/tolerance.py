"""Deviations of tensors from a reference, and the tolerance: a multiple of a control's deviation.

Rounding scatters: it hardly moves a tensor along itself (`scale`) or to one side (`bias`). A
control is the same step, rounded to the variant's precision. In 30 nets (MLPs, CNNs, recurrent,
transformers), in training and in evaluation, autocast deviated 0.5 to 1.5 times as much as its
control in every output, and up to 6 times in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.right.reference import unit

# A tensor and its reference; None means zeros: a step may or may not make a gradient of zeros.
Pair = tuple[torch.Tensor | None, torch.Tensor | None]

# Near float32's smallest numbers some kernels give zero.
NOTHING = 1e-37
# A gradient is compared relative to this share of the root mean square of all gradients at least:
# a smaller one may be a zero that rounding moved, as in a bias before a batch norm.
LEFT_OF_ZERO = 1e-4
# And to this much at least: it is less than Adam's eps (1e-8), squared.
LEAST_GRADIENT = 1e-12
# If a tensor exceeds its limit by less than this factor, the network or the plan may be the cause.
# Then the variant is not called wrong, but can't win.
DOUBT = 2.0
# The limit of each kind of tensor: a multiple of its control's deviation, plus a share, plus a
# number of roundings for other kernels.
# A ReLU or a maximum that falls the other way by rounding moved gradients by 2e-2 in fp16; batch
# statistics of 8 samples moved by 4e-2. Parameters that move outside of a compared optimizer step
# may be Adam's, and rounding turns the first steps of Adam in some elements.
LIMITS = {
    "output": (3.0, 0.0, 2.0),
    "gradient": (8.0, 2e-2, 16.0),
    "gradients": (4.0, 1e-2, 4.0),  # all together
    "parameter": (4.0, 1e-2, 2.0),
    "moved": (4.0, 0.25, 2.0),
    "buffer": (8.0, 5e-2, 2.0),
}
# float32 kernels add up in another order, which brings as many roundings as there are terms. (Of
# 30 nets' outputs none was off by more than 42; then came a small convolutional net with 120.)
TERMS = 512.0
# If rounding alone moves a tensor by its own size, nothing can be said about it.
UNDETERMINED = 1.0


class Deviation(NamedTuple):
    """The norm of the difference over the reference's norm; the regression coefficient of the
    difference on the reference; the mean difference over the reference's root mean square.
    """

    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0


class Sums(NamedTuple):
    """Sums over `size` elements: squares of the difference and of the reference, their product, and
    the difference.
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
        """Return the deviation relative to the reference, or to `least` per element if larger."""
        square = max(self.square, least**2 * self.size)
        if self.off <= NOTHING**2 * self.size:
            return Deviation()
        if not square:
            return Deviation(math.inf, math.inf, math.inf)
        bias = abs(self.shift) / math.sqrt(square * self.size)
        return Deviation(math.sqrt(self.off / square), abs(self.product) / square, bias)

    def along(self, way: float, dtype: torch.dtype) -> Sums:
        """Return the sums relative to the `way` that a parameter of this dtype went."""
        if not math.isfinite(self.off):
            return self
        # A parameter that is off by four roundings of its dtype is where it should be.
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        off = max(0.0, math.sqrt(self.off) - 4 * eps * math.sqrt(self.square))
        return Sums(self.size, off * off, way * way)


def total(parts: Sequence[Sums]) -> Sums:
    return Sums(*map(sum, zip(*parts, strict=True))) if parts else Sums(0)


def sums(pairs: Sequence[Pair]) -> list[Sums]:
    """Reduce each pair on its device; one transfer for all."""
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
    """Add up in float64 if `wide`; with `masked`, equal infinities and NaN in both are alike."""
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
    """Return each gradient's deviation, relative to its reference or to a small share of all; for a
    gradient that is zero compared with others of its module, relative to these.
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
        found.append(part.deviation(of_module if is_zero else least))
    return found


def beyond_limit(
    found: Deviation, size: int, control: Deviation | None, kind: str, precision: str
) -> tuple[float, str]:
    """Return how many times its limit a tensor is off, and that in words; 0 where undetermined."""
    times, share, roundings = LIMITS[kind]
    known = control or Deviation(*[8 * unit(precision)] * 3)  # typical, where no control could run
    if known.distance >= UNDETERMINED:
        return 0.0, ""
    # A control may have no scale or bias by chance, so its distance, spread over the elements,
    # counts too. In a row or a channel 64 elements count as one error: they share their rounding.
    spread = known.distance * min(1.0, math.sqrt(64 / max(size, 1)))
    # Scatter within a net that normalizes shortens the rest of the signal by 1 + scatter**2.
    spread += known.distance**2 / 2
    share += roundings * unit(precision) * (TERMS if precision == "fp32" else 1.0)
    explained = [
        ("off", found.distance, times * known.distance),
        ("scaled", found.scale, 4.0 * (known.scale + spread)),
        ("shifted", found.bias, 4.0 * (known.bias + spread)),
    ]
    worst = (0.0, "")
    # A maximum that falls the other way shifts a whole bias's gradient: bias counts in outputs.
    for word, value, most in explained if kind == "output" else explained[:2]:
        most += share
        excess = math.inf if math.isnan(value) else value / most
        if excess > worst[0]:
            worst = excess, f"{word} by {value:.2g}, where {precision} explains {most:.2g}"
    return worst
