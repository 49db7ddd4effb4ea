"""How far tensors are off others: by norm, scale and bias; and how much of it rounding explains.

Rounding scatters. What it does to a tensor has hardly a direction along it (`scale`) or a sign
(`bias`). A control is the same step, rounded to the variant's precision. Of 30 nets
(MLPs, CNNs, recurrent, transformers), in training and in evaluation, real autocast was off by 0.5
to 1.5 times as much as its control in every output, in gradients by up to 6 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.checks.rounding import unit

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor | None, torch.Tensor | None]

# Near float32's smallest numbers some kernels give zero.
NOTHING = 1e-37
# A gradient is compared relative to this share of the root mean square of all gradients at least:
# a smaller one may be what rounding left of a zero, as in a bias before a batch norm.
LEFT_OF_ZERO = 1e-4
# And to this much at least: it is less than what Adam adds to what it divides by (1e-8), squared.
LEAST_GRADIENT = 1e-12


@dataclass(frozen=True)
class Sums:
    """Of one tensor with `size` elements: squares of the difference and of the reference, their
    product, and the sum of the difference.
    """

    size: int
    off: float = 0.0
    square: float = 0.0
    product: float = 0.0
    shift: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.size + other.size,
            self.off + other.off,
            self.square + other.square,
            self.product + other.product,
        )

    def deviation(self, least: float = 0.0) -> Deviation:
        """Relative to the reference, or to a root mean square of `least` if that is more."""
        square = max(self.square, least**2 * self.size)
        if self.off <= NOTHING**2 * self.size:
            return Deviation(self.size)
        if not square:
            return Deviation(self.size, math.inf, math.inf, math.inf)
        bias = abs(self.shift) / math.sqrt(square * self.size)
        return Deviation(self.size, math.sqrt(self.off / square), abs(self.product) / square, bias)


@dataclass(frozen=True)
class Deviation:
    """`distance`: norm of the difference over that of the reference. `scale`: the regression
    coefficient of the difference on the reference. `bias`: the mean difference over the root mean
    square of the reference.
    """

    size: int
    distance: float = 0.0
    scale: float = 0.0
    bias: float = 0.0

    def times(self, factor: float) -> Deviation:
        """All of it so many times as large."""
        return Deviation(self.size, factor * self.distance, factor * self.scale, factor * self.bias)


def sums(pairs: Sequence[Pair]) -> list[Sums]:
    """Reduce each pair of a tensor and its reference on its device; one transfer for all.

    No tensor is one of zeros: a step may or may not make a gradient of those.
    """
    sizes = [max(0 if one is None else one.numel() for one in pair) for pair in pairs]
    waiting = [
        (index, pair) for index, pair in enumerate(pairs) if sizes[index] and pair[0] is not pair[1]
    ]
    found = [Sums(size) for size in sizes]
    for masked in (False, True):
        rows = _reduced([pair for _, pair in waiting], masked)
        for (index, _), row in zip(waiting, rows, strict=True):
            found[index] = Sums(sizes[index], *row)
        again = [not all(map(math.isfinite, row)) for row in rows]
        waiting = [one for one, is_left in zip(waiting, again, strict=True) if is_left]
    return found


def _reduced(pairs: Sequence[Pair], masked: bool) -> list[list[float]]:
    import torch

    rows = [_row(*pair, masked) for pair in pairs]
    values: dict[int, list[float]] = {}
    for device in {row.device for row in rows}:
        there = [index for index, row in enumerate(rows) if row.device == device]
        stacked = torch.stack([rows[index] for index in there]).tolist()
        values |= dict(zip(there, stacked, strict=True))
    return [values[index] for index in range(len(rows))]


def _row(tensor: torch.Tensor | None, reference: torch.Tensor | None, masked: bool) -> torch.Tensor:
    """With `masked`, what is infinite or NaN in both counts as alike."""
    import torch

    pair = [tensor, reference]
    there = next(one for one in pair if one is not None)
    first, second = (torch.zeros_like(there) if one is None else one for one in pair)
    if first.is_complex() or second.is_complex():
        first, second = (torch.view_as_real(x.resolve_conj()) for x in (first, second))
    if first.dtype in (torch.float16, torch.bfloat16):
        first = first.float()
    difference = first - second
    if masked:
        known = ((first == second) | (first.isnan() & second.isnan())) & ~second.isfinite()
        difference, second = difference.masked_fill(known, 0), second.masked_fill(known, 0)
    wide = torch.float64 if devices.has_float64(there.device) else torch.float32
    norms = [torch.linalg.vector_norm(x, dtype=wide) ** 2 for x in (difference, second)]
    product = (difference * second).sum(dtype=wide)
    return torch.stack([*norms, product, difference.sum(dtype=wide)])


def of_gradients(parts: Sequence[Sums]) -> list[Deviation]:
    """Each relative to its reference, or to a small share of all gradients."""
    count = sum(part.size for part in parts)
    whole = math.sqrt(sum(part.square for part in parts) / max(count, 1))
    least = max(LEAST_GRADIENT, LEFT_OF_ZERO * whole) if math.isfinite(whole) else 0.0
    return [part.deviation(least) for part in parts]


@dataclass(frozen=True)
class Limit:
    """How far a kind of tensor may be off: so many times its control, by distance, scale and bias;
    `besides` it, as a share; and so many roundings, for what kernels do besides.
    """

    times: tuple[float, float, float]
    besides: float
    roundings: float


# A ReLU or a maximum that falls the other way by rounding shifts a whole bias's gradient: it has no
# limit of bias, and moved gradients by 2e-2 in fp16; batch statistics of 8 samples moved by 4e-2.
# What moves parameters beside an optimizer's step that is followed may be Adam, whose first steps
# rounding turns in some elements.
LIMITS = {
    "output": Limit((3.0, 4.0, 4.0), 0.0, 2.0),
    "gradient": Limit((8.0, 4.0, math.inf), 2e-2, 16.0),
    "gradients": Limit((4.0, 4.0, math.inf), 1e-2, 4.0),  # all together
    "parameter": Limit((4.0, 4.0, math.inf), 1e-2, 2.0),
    "moved": Limit((4.0, 4.0, math.inf), 0.25, 2.0),
    "buffer": Limit((8.0, 8.0, math.inf), 5e-2, 2.0),
}
# float32 kernels add up in another order, which brings as many roundings as there are terms. (Of
# 30 nets' outputs none was off by more than 42; then came a small convolutional net with 120.)
TERMS = 512.0
# So many elements err as one: those of a row or a channel have their rounding in common. Chance
# may leave a control without any scale or bias: its distance counts too, spread over its elements.
ERR_AS_ONE = 64
# Scatter within a net that normalizes shortens what is left of the signal, by 1 + scatter**2.
SHORTENED = 0.5
# What a net is taken to be off by, in roundings, where no control could be run.
TYPICAL = 8.0
# What rounding alone moves by as much as there is can't be told from anything.
UNDETERMINED = 1.0
WORDS = ("off", "scaled", "shifted")


def excess(
    found: Deviation, control: Deviation | None, kind: str, precision: str
) -> tuple[float, str]:
    """Return how many times its limit a tensor is off, and that in words; 0 where undetermined."""
    typical, limit = TYPICAL * unit(precision), LIMITS[kind]
    known = control or Deviation(found.size, typical, typical, typical)
    if known.distance >= UNDETERMINED:
        return 0.0, ""
    spread = known.distance * min(1.0, math.sqrt(ERR_AS_ONE / max(found.size, 1)))
    spread += SHORTENED * known.distance**2
    roundings = limit.roundings * unit(precision) * (TERMS if precision == "fp32" else 1.0)
    values = (found.distance, found.scale, found.bias)
    controls = (known.distance, known.scale + spread, known.bias + spread)
    worst = (0.0, "")
    for word, value, own, factor in zip(WORDS, values, controls, limit.times, strict=True):
        most = factor * own + roundings + limit.besides if math.isfinite(factor) else math.inf
        times = math.inf if math.isnan(value) else value / most
        if times > worst[0]:
            worst = times, f"{word} by {value:.2g}, where {precision} explains {most:.2g}"
    return worst
