"""Parts of a gradient, each on its own scale: what is small beside the rest is not hidden by it.

Query, key and value of one projection, the gates of a recurrent layer, packed experts, heads and
tables beside one another are contiguous along a dimension. Where they begin is not known: each
dimension is cut into 2, 3, 4, ... parts, and what is wrong fills some of them. Single rows tell
nothing, since a ReLU that falls the other way by rounding moves one by much.

Of 32 nets in bf16, fp16 and with other kernels in fp32, what a part was off by was 0.8 of the limit
at most; another one, a small convolutional net in fp32, was beyond it, so that FLIPS is wider now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# How many parts a dimension is cut into, of so many elements and rows at least.
COUNTS, LEAST_ELEMENTS, LEAST_ROWS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32), 32, 4
# Of packed matrices, each of which has so many rows and columns, one may be a part.
LEAST_OF_MATRIX = 8
# A part may be off by so many times what a control is there; and, relative to its own size, by so
# many times what a control is in the whole tensor, and by so many roundings.
KNOWN, WHOLE, ROUNDINGS = 4.0, 8.0, 16.0
# Its regression on the reference: scatter has hardly any, even where it is large.
KNOWN_ALONG, SCATTER, WHOLE_ALONG, ROUNDINGS_ALONG = 4.0, 1.5, 0.5, 4.0
# And by so much of the whole tensor's rounding, which is all that there is in a part of zeros.
OF_ALL = 1e-3
# A ReLU that falls the other way; of a small convolution in float32 it was 0.014.
FLIPS, FLIPS_ALONG = 5e-2, 1e-2


@dataclass(frozen=True)
class Parts:
    """Of each part the root mean squares of difference and reference, and their mean product."""

    shape: torch.Size
    off: torch.Tensor
    size: torch.Tensor
    along: torch.Tensor

    def name(self, index: int) -> str:
        """Where it lies: `rows 32 to 63`."""
        for dimension, count in _cuts(self.shape):
            if index < count:
                size = self.shape[dimension]
                first, end = (-(-cut * size // count) for cut in (index, index + 1))
                kind = "elements" if len(self.shape) == 1 else ("rows", "columns")[dimension > 0]
                where = f" of dimension {dimension}" if dimension > 1 else ""
                return f"{kind} {first} to {end - 1}{where}"
            index -= count
        raise IndexError(index)


def parts(difference: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> Parts | None:
    """Of a gradient of any shape; None of one too small for any.

    Each is taken to have a root mean square of `least` at least: what is smaller may be noise.
    """
    import torch

    products, means = (difference**2, reference**2, difference * reference), []
    sums: dict[int, torch.Tensor] = {}
    for dimension, count in _cuts(reference.shape):
        size = reference.shape[dimension]
        if dimension not in sums:
            axes = [axis for axis in range(reference.dim()) if axis != dimension]
            sums[dimension] = torch.stack(
                [product.sum(axes) if axes else product for product in products]
            )
        which = torch.arange(size) * count // size
        elements = which.bincount() * (reference.numel() // size)
        totals = sums[dimension].new_zeros(3, count).index_add(1, which, sums[dimension])
        means.append(totals / elements)
    if not means:
        return None
    off, size, along = torch.cat(means, 1)
    return Parts(reference.shape, off.sqrt(), size.sqrt().clamp_min(least), along)


def beyond(
    parts: Parts, controls: Sequence[Parts], distance: float, rounding: float, width: float = 1.0
) -> str:
    """In which part it is off by more than rounding explains; empty where it is in none.

    `distance` is what the controls are off by in the whole tensor, `rounding` one of the precision.
    """
    import torch

    size = parts.size
    least = ROUNDINGS * rounding * OF_ALL * float(size.square().mean().sqrt())
    off = torch.stack([control.off for control in controls]).amax(0)
    along = torch.stack([control.along.abs() for control in controls]).amax(0)
    whole = WHOLE * distance + ROUNDINGS * rounding + FLIPS
    limit = width * (KNOWN * off + whole * size + least)
    whole = WHOLE_ALONG * distance + ROUNDINGS_ALONG * rounding + FLIPS_ALONG
    limit_along = width * (KNOWN_ALONG * along + (SCATTER * off + whole * size + least) * size)
    for kind, value, most, scale in (
        ("off", parts.off, limit, size),
        ("scaled", parts.along.abs(), limit_along, size**2),
    ):
        if bool((value > most).any()):
            worst = int((value / most.clamp_min(1e-300)).argmax())
            own = max(float(scale[worst]), 1e-300)
            return (
                f"{kind} in its {parts.name(worst)} by {float(value[worst]) / own:.2g} of their "
                f"size, more than rounding explains ({float(most[worst]) / own:.2g})"
            )
    return ""


def _cuts(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Dimension, and into how many parts it is cut."""
    elements = shape.numel()
    packed = len(shape) == 3 and min(shape[1:]) >= LEAST_OF_MATRIX
    for dimension, size in enumerate(shape):
        rows = 1 if packed and dimension == 0 else LEAST_ROWS
        for count in COUNTS:
            if count * rows <= size and elements >= LEAST_ELEMENTS * count:
                yield dimension, count
