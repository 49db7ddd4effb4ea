"""How far tensors are off others, by norm, scale and bias, and how much of it rounding explains.

Rounding scatters: what it does to a tensor has hardly a direction along it (`scale`) or a sign
(`bias`). A control is the same step, rounded to the variant's precision. Of 30 nets
(MLPs, CNNs, recurrent, transformers), in training and in evaluation, real autocast was off by 0.5
to 1.5 times as much as its control in every output, in gradients by up to 6 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class Deviation(NamedTuple):
    """The norm of the difference over that of the reference; the regression coefficient of the
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

    None stands for zeros: a step may or may not make a gradient of those.
    """
    import torch

    found = [Sums(max(0 if one is None else one.numel() for one in pair)) for pair in pairs]
    left = [i for i, pair in enumerate(pairs) if found[i].size and pair[0] is not pair[1]]
    for masked in (False, True):
        rows = [_row(*pairs[i], masked) for i in left]
        values = torch.stack([row.to(rows[0]) for row in rows]).tolist() if rows else []
        for i, row in zip(left, values, strict=True):
            found[i] = Sums(found[i].size, *row)
        left = [i for i in left if not all(map(math.isfinite, found[i]))]
    return found


def _row(tensor: torch.Tensor | None, reference: torch.Tensor | None, masked: bool) -> torch.Tensor:
    """With `masked`, what is infinite or NaN in both counts as alike."""
    import torch

    there = next(one for one in (tensor, reference) if one is not None)
    first, second = (torch.zeros_like(there) if x is None else x for x in (tensor, reference))
    if first.is_complex() or second.is_complex():
        first, second = (torch.view_as_real(x.resolve_conj()) for x in (first, second))
    if first.dtype in (torch.float16, torch.bfloat16):
        first = first.float()
    difference = first - second
    if masked:
        known = ((first == second) | (first.isnan() & second.isnan())) & ~second.isfinite()
        difference, second = difference.masked_fill(known, 0), second.masked_fill(known, 0)
    kind = devices.kind_of(there.device.type)
    wide = torch.float64 if kind is None or kind.has_float64 else torch.float32
    norms = [torch.linalg.vector_norm(x, dtype=wide) ** 2 for x in (difference, second)]
    product = (difference * second).sum(dtype=wide)
    return torch.stack([*norms, product, difference.sum(dtype=wide)])


def of_gradients(parts: Sequence[Sums]) -> list[Deviation]:
    """Return each relative to its reference, or to a small share of all gradients."""
    whole = total(parts)
    mean = math.sqrt(whole.square / max(whole.size, 1))
    least = max(LEAST_GRADIENT, LEFT_OF_ZERO * mean) if math.isfinite(mean) else 0.0
    return [part.deviation(least) for part in parts]


# How far a kind of tensor may be off: so many times its control, a share besides, and so many
# roundings, for what kernels do besides.
# A ReLU or a maximum that falls the other way by rounding moved gradients by 2e-2 in fp16; batch
# statistics of 8 samples moved by 4e-2. What moves parameters beside an optimizer's step that is
# followed may be Adam, whose first steps rounding turns in some elements.
LIMITS = {
    "output": (3.0, 0.0, 2.0),
    "gradient": (8.0, 2e-2, 16.0),
    "gradients": (4.0, 1e-2, 4.0),  # all together
    "parameter": (4.0, 1e-2, 2.0),
    "moved": (4.0, 0.25, 2.0),
    "buffer": (8.0, 5e-2, 2.0),
}
# Scale and bias may be so many times the control's. A maximum that falls the other way shifts a
# whole bias's gradient: bias counts in outputs alone.
ALONG = 4.0
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


def beyond_limit(
    found: Deviation, size: int, control: Deviation | None, kind: str, precision: str
) -> tuple[float, str]:
    """Return how many times its limit a tensor is off, and that in words; 0 where undetermined."""
    times, besides, roundings = LIMITS[kind]
    known = control or Deviation(*[TYPICAL * unit(precision)] * 3)
    if known.distance >= UNDETERMINED:
        return 0.0, ""
    spread = known.distance * min(1.0, math.sqrt(ERR_AS_ONE / max(size, 1)))
    spread += SHORTENED * known.distance**2
    besides += roundings * unit(precision) * (TERMS if precision == "fp32" else 1.0)
    explained = [
        ("off", found.distance, times * known.distance),
        ("scaled", found.scale, ALONG * (known.scale + spread)),
        ("shifted", found.bias, ALONG * (known.bias + spread)),
    ]
    worst = (0.0, "")
    for word, value, most in explained if kind == "output" else explained[:2]:
        most += besides
        excess = math.inf if math.isnan(value) else value / most
        if excess > worst[0]:
            worst = excess, f"{word} by {value:.2g}, where {precision} explains {most:.2g}"
    return worst
