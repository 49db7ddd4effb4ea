"""Whole numbers that differ: how many, and by how much; and what controls explain of both.

What rounding does to one is known by the controls alone. A count of many rows scatters as the
root of those that fall the other way, by little; the number of a class, a hash, a place in an
order goes anywhere, and its size tells nothing: there only how many differ counts, and of a single
one nothing can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# More single numbers than this are compared together: the classes of a list, say.
SINGLES = 8
# Of so many whole numbers a few may be decided by float32's rounding, by this share.
MANY, OF_MANY = 512, 1e-4
# Of so many a few may be another class although no control shows it.
SEVERAL = 64
# What controls move by more than this share of the largest (of LARGE at least) goes anywhere.
ANYWHERE, LARGE = 0.25, 16.0
# A number that so many controls move by little is a count, and numbers of which so many are moved.
TELLING, TELLING_OF_MANY = 4, 16
# What is off by so many times what controls explain is none of the net's.
SURELY = 2.0


@dataclass(frozen=True)
class Differing:
    """How many of `size` whole numbers differ, by how much at `most` and in `total`.

    `largest` is the largest magnitude of the reference, `spread` what its numbers lie apart.
    """

    count: int
    size: int
    most: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    spread: float = 0.0


def differing(ones: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> list[Differing]:
    """Of int64 tensors, one by one; many single ones are taken together."""
    import torch

    pairs = list(zip(ones, references, strict=True))
    singles = [pair for pair in pairs if pair[1].numel() == 1]
    if len(singles) > SINGLES:
        rest = [pair for pair in pairs if pair[1].numel() != 1]
        together = zip(
            *((tensor.flatten(), other.flatten()) for tensor, other in singles), strict=True
        )
        tensor, other = map(torch.cat, together)
        pairs = [*rest, (tensor, other)]
    return [_differing(tensor, other) for tensor, other in pairs]


def _differing(tensor: torch.Tensor, reference: torch.Tensor) -> Differing:
    count, size = int((tensor != reference).sum()), reference.numel()
    if not count:
        return Differing(0, size)
    wanted = reference.double()
    off = (tensor.double() - wanted).abs()
    spread = float(wanted.max() - wanted.min())
    return Differing(
        count, size, float(off.max()), float(off.sum()), float(wanted.abs().max()), spread
    )


def beyond(
    seen: Sequence[Differing], controls: Sequence[Sequence[Differing]], precision: str,
    strict: bool, surely: bool, settings: bool = False,
) -> str:  # fmt: skip
    """What rounding does not explain; empty where it explains all.

    `strict` is whether the sizes count, and what no control moves; with `surely` what may be the
    net is left out, but for `settings`, which are not its own.
    """
    unmoved = strict and not any(in_all(control)[0] for control in controls)
    for index, difference in enumerate(seen):
        known = [control[index] for control in controls if index < len(control)]
        limit = (
            _strictly(precision, difference.size) if unmoved else allowed(known, difference.size)
        )
        if difference.count > limit:
            return _others(difference.count, difference.size, precision, limit)
        if (
            strict
            and difference.count
            and (fault := _by_too_much(difference, known, precision, surely, settings))
        ):
            return fault
    # Together too: of a list of single ones each might differ.
    count, size = in_all(seen)
    limit = allowed_in_all(controls, size)
    return _others(count, size, precision, limit) if count > limit else ""


def in_all(seen: Sequence[Differing]) -> tuple[int, int]:
    """How many whole numbers differ, of how many."""
    return sum(difference.count for difference in seen), sum(difference.size for difference in seen)


def allowed(known: Sequence[Differing], size: int) -> int:
    """How many of these may differ: the controls' with the scatter of a count, and 1 %."""
    return may_differ(max((difference.count for difference in known), default=0), size)


def allowed_in_all(controls: Sequence[Sequence[Differing]], size: int) -> int:
    """How many of all whole numbers of a step may differ."""
    return may_differ(max((in_all(control)[0] for control in controls), default=0), size)


def may_differ(count: int, size: int) -> int:
    """How many of `size` may, where `count` do in a control."""
    scatter = 3 * count**0.5 + 1 + 0.01 * size
    # Where most do, all might: what each is spared by is what counts.
    spared = (1.0 - min(count / max(size, 1), 1.0)) ** 4
    return int(min(2.0 * count, (1.0 - spared) * size) + scatter)


def _strictly(precision: str, size: int) -> int:
    """How many of these may differ where rounding changes none of all in any control.

    Of many numbers that are each the largest of some a few may lie closer together than the
    controls happen to show. What becomes of a single one its size tells.
    """
    if size == 1:
        return 1
    if precision == "fp32":
        return 0 if size < MANY else int(1 + OF_MANY * size)
    return may_differ(0, size)


def _by_too_much(
    difference: Differing, known: Sequence[Differing], precision: str, surely: bool, settings: bool
) -> str:
    """Of numbers of which no more differ than may."""
    most, total = (max((getattr(it, name) for it in known), default=0.0) for name in MEASURES)
    moved = sum(it.count for it in known)
    if not most:
        return _unmoved(difference, precision, surely and not settings)
    if most > ANYWHERE * max(difference.largest, LARGE):
        can_fail = difference.size > 1 and allowed(known, difference.size) < difference.size
        return (
            ""
            if surely or can_fail
            else _off(difference, f"where {precision} alone moves them anywhere")
        )
    sure = moved >= (TELLING if difference.size == 1 else TELLING_OF_MANY)
    if not sure and (
        surely or (difference.size >= SEVERAL and difference.most <= difference.spread)
    ):
        return ""
    count = max(it.count for it in known)
    width = SURELY if surely else 1.0
    by = width * (2 * most + 3 * most**0.5)
    by_in_all = width * (2 * total + 3 * count**0.5 * most + most)
    if difference.most > by:
        return _off(difference, f"more than {precision} explains ({by:.3g})")
    if difference.size > 1 and difference.total > by_in_all:
        return (
            f"whole numbers differ by {difference.total:.3g} in all, "
            f"more than {precision} explains ({by_in_all:.3g})"
        )
    return ""


MEASURES = ("most", "total")


def _unmoved(difference: Differing, precision: str, surely: bool) -> str:
    """What no control moves: by little it may be chance, and a class by anything."""
    if difference.size >= SEVERAL and difference.most <= difference.spread:
        return ""
    chance = difference.most <= 1 + OF_MANY * difference.largest if precision == "fp32" else True
    return "" if surely and chance else _off(difference, f"where {precision} alone moves none")


def _off(difference: Differing, explained: str) -> str:
    count = f"{difference.count} of {difference.size}"
    return f"{count} whole numbers differ, by up to {difference.most:.4g}, {explained}"


def _others(count: int, size: int, precision: str, limit: int) -> str:
    return f"{count} of {size} whole numbers differ, more than {precision} explains ({limit})"
