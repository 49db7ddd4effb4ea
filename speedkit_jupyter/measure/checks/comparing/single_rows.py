"""Each row of a tensor by itself: what lies at one index of any dimension.

Rounding scatters, and a ReLU that falls the other way moves a row by much, but hardly along
itself: one that is 1.5 times as large is no chance. Each is judged by what the controls did to
that very row, and to the rows about as large beside it: the worst of these is what chance may do
to any of them. Rows with little left after cancelling are so compared with their like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dimensions of so many rows are looked at; of numbers alone, no more.
LEAST_ROWS, MOST_SINGLE = 4, 2**16
# So many rows on each side, by their size, are a row's like.
BESIDE = 16
# A row may be off by so many times what a control is there, and what one is in any of its like.
KNOWN, LIKE = 2.0, 1.5
# A single number, an element of a bias say, is what is left of many, and nothing averages what it
# is off by: by so many times as much, and by so much of the scatter of all.
SINGLE, SCATTER = 3.5, 4.0
# One activation that falls the other way moves any of them alike, be little left of it or much: by
# this share of the whole tensor's size. (In a small net with batch norm, whose kernel for
# channels_last rounds 400 times as coarsely in float32, it was 0.003 to 0.02 of it.)
FLIPS_OF_ALL = 1e-2
# What is off by so many times as much is none of the net's.
SURELY = 3.5
# By so many roundings of its size; and by so much of the whole tensor's.
ROUNDINGS, ROUNDINGS_ALONG, OF_ALL = 16.0, 5.0, 1e-3
# And by what an activation that no control met does, of gradients.
FLIPS, FLIPS_ALONG = 0.1, 2e-2
# What is smaller than this share of the whole tensor's size is as good as zero.
NOTHING = 1e-6


@dataclass(frozen=True)
class Rows:
    """Of each row the root mean squares of difference and reference, and their mean product."""

    shape: torch.Size
    off: torch.Tensor
    size: torch.Tensor
    along: torch.Tensor

    def name(self, index: int) -> str:
        """Where it lies: `row 32`."""
        for dimension, count in _dimensions(self.shape):
            if index < count:
                if len(self.shape) == 1:
                    return f"element {index}"
                where = f" of dimension {dimension}" if dimension > 1 else ""
                return f"{('row', 'column')[dimension > 0]} {index}{where}"
            index -= count
        raise IndexError(index)


def single_rows(
    difference: torch.Tensor, reference: torch.Tensor, least: float = 0.0
) -> Rows | None:
    """Of float64 tensors of one shape; None of what has too few.

    Each is taken to have a root mean square of `least` at least: what is smaller may be noise.
    """
    import torch

    means = []
    for dimension, _ in _dimensions(reference.shape):
        axes = [axis for axis in range(reference.dim()) if axis != dimension]
        products = (difference**2, reference**2, difference * reference)
        means.append(torch.stack([product.mean(axes) if axes else product for product in products]))
    if not means:
        return None
    off, size, along = torch.cat(means, 1)
    return Rows(reference.shape, off.sqrt(), size.sqrt().clamp_min(least), along)


def beyond(
    rows: Rows, controls: Sequence[Rows], rounding: float, flips: float, width: float = 1.0
) -> str:
    """In which row it is off by more than rounding explains; empty where it is in none.

    `rounding` is one of the precision, `flips` how much activations that fall the other way count.
    """
    for kind, off, limit in shares(rows, controls, rounding, flips):
        limit = limit * width
        if bool((off > limit).any()):
            worst = int((off / limit).argmax())
            return (
                f"{kind} in its {rows.name(worst)} by {float(off[worst]):.2g} of its size, more "
                f"than rounding explains ({float(limit[worst]):.2g})"
            )
    return ""


def shares(
    rows: Rows, controls: Sequence[Rows], rounding: float, flips: float
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """In which way, what each row is off by as a share of its size, and what it may be."""
    whole = float(rows.size.square().mean().sqrt())
    size = rows.size.clamp_min(max(NOTHING * whole, 1e-300))
    single = _is_single(rows)
    scatter = single * _worst([_scatter(control) for control in controls])
    least = rounding * OF_ALL * whole / size
    for kind, roundings, more, measure in (
        ("scaled", ROUNDINGS_ALONG, FLIPS_ALONG, _along),
        ("off", ROUNDINGS, FLIPS, _off),
    ):
        known = _worst([measure(control) / size for control in controls])
        limit = KNOWN * known + LIKE * _of_their_like(known, rows) + SCATTER * scatter / size
        limit = limit + roundings * (rounding + least) + flips * more
        limit = limit + flips * FLIPS_OF_ALL * single * whole / size
        yield kind, measure(rows) / size, limit * (1.0 + (SINGLE - 1.0) * single)


def _along(rows: Rows) -> torch.Tensor:
    return rows.along.abs() / rows.size.clamp_min(1e-300)


def _off(rows: Rows) -> torch.Tensor:
    return rows.off


def _scatter(rows: Rows) -> torch.Tensor:
    """What they are off by in all."""
    return rows.off.square().mean().sqrt()


def _is_single(rows: Rows) -> torch.Tensor:
    """1 for each row that is a single number, else 0."""
    import torch

    counts = [(count, rows.shape.numel() == count) for _, count in _dimensions(rows.shape)]
    return torch.cat([rows.off.new_full((count,), float(alone)) for count, alone in counts])


def _worst(measures: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(list(measures)).amax(0)


def _of_their_like(known: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The worst among the rows of the same dimension that are about as large."""
    import torch
    from torch.nn import functional

    worst, start = torch.empty_like(known), 0
    for _, count in _dimensions(rows.shape):
        here = slice(start, start + count)
        order = rows.size[here].argsort()
        ranked = known[here][order][None, None]
        most = functional.max_pool1d(ranked, 2 * BESIDE + 1, stride=1, padding=BESIDE)[0, 0]
        worst[here] = torch.empty_like(most).scatter_(0, order, most)
        start += count
    return worst


def _dimensions(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Each that is looked at, and its rows."""
    for dimension, count in enumerate(shape):
        alone = shape.numel() == count
        if count >= LEAST_ROWS and shape.numel() and not (alone and count > MOST_SINGLE):
            yield dimension, count
