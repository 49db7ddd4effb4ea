"""Whether the parameters went where the baseline's did, by whatever moved them: an average, say.

Every run begins a stretch with the same parameters. What the baseline leaves where it is stays
there in each of them, whatever the precision, unless a control moves it too; and what no gradient
leads is but for rounding the same way, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.deviation import vanish
from speedkit_jupyter.measure.checks.labels import Names
from speedkit_jupyter.measure.checks.magnitudes import norm
from speedkit_jupyter.measure.checks.plain import or_nothing
from speedkit_jupyter.measure.checks.tolerance import told_apart

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observation import Observation

# So many times what the controls are off, and this share of the way more; without a control what
# goes the other way is wrong.
FACTOR, BESIDES, UNKNOWN = 4.0, 0.1, 1.5
# An element may be off by so many times what the controls are there, and what they usually are in
# its parameter; by this share of its own way (of which more where no control shows it), and by so
# many of the parameter's neighbouring numbers.
USUAL, OF_WAY, OF_WAY_ALONE, NEIGHBOURS = 16.0, 0.02, 0.2, 4.0
# And without a control by this share of the usual way.
OF_USUAL_ALONE = 0.2
# Where an optimizer steps within the backward pass its gradients are not seen: a few elements of a
# parameter may go the other way by rounding, which Adam makes of those that are nearly zero.
FEW_ELEMENTS = 0.03
# What an element moves by counts from so many roundings of float32 on.
ROUNDINGS, FLOAT32 = 4.0, 2.0**-23


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Of complex numbers both parts."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def moved(way: torch.Tensor, start: torch.Tensor) -> int:
    """How many elements of a parameter are elsewhere, by more than rounding."""
    import torch

    eps = max(torch.finfo(start.dtype).eps, FLOAT32)
    return int((~(way.abs() <= ROUNDINGS * eps * real(or_nothing(start)).abs())).sum())


def astray(
    seen: Observation,
    baseline: Observation,
    controls: Sequence[Observation],
    names: Names | None = None,
    before: Sequence[Observation] = (),
) -> str:
    """How far off they went, where rounding does not explain it; empty where it does.

    `before` are earlier stretches: an optimizer goes by their gradients too.
    """
    names = names or Names()
    others = [one for one in controls if one is not baseline]
    if what := _left_its_place(seen, baseline, others, names, before):
        return what
    # All begin in the same place: where no gradient leads them, each alone is nothing but that.
    led = baseline.has_gradients() or seen.has_gradients()
    if led and any(map(vanish, (baseline, *others))):  # an optimizer that divides goes by noise
        return ""
    single = range(0 if led else len(baseline.way))
    for which in (slice(None), *(slice(one, one + 1) for one in single)):
        found = _off(seen, baseline, which)
        known = [_off(one, baseline, which) for one in others]
        there = [one for one in known if one is not None]
        # Of what rounding alone may lead anywhere nothing can be told.
        if found is None or (known and not there) or not all(map(math.isfinite, there)):
            continue
        limit = FACTOR * max(there) + BESIDES if there else UNKNOWN
        if baseline.in_backward and which != slice(None):
            count = baseline.way[which][0].numel()
            limit += 2 * (max(1.0, FEW_ELEMENTS * count) / max(count, 1)) ** 0.5
        if not found <= limit:
            off, most = told_apart(found, limit)
            return f"the parameters went {off} of their way off, more than rounding does ({most})"
    for index in () if baseline.in_backward else single:
        if what := _elsewhere(index, seen, baseline, others, names):
            return f"parameter {names.parameter(index)} {what}"
    return ""


def _left_its_place(
    seen: Observation,
    baseline: Observation,
    others: Sequence[Observation],
    names: Names,
    before: Sequence[Observation],
) -> str:
    """A parameter that no gradient leads, or led, and that stays in the baseline and in all
    controls.
    """
    leading = (seen, baseline, *(before if seen.updates else ()))  # by a momentum: it steps
    for index, count in enumerate(seen.movers):
        known = any(_at(one.movers, index) for one in (baseline, *others))
        if count and not known and not any(_led(index, one) for one in leading):
            return f"parameter {names.parameter(index)} moved, where it stays"
    return ""


def _led(index: int, one: Observation) -> bool:
    gradient = one.gradients[index] if index < len(one.gradients) else None
    return gradient is not None and bool(gradient.any())


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def _elsewhere(
    index: int,
    seen: Observation,
    baseline: Observation,
    others: Sequence[Observation],
    names: Names,
) -> str:
    """Single elements of a parameter that went elsewhere, each on its own scale."""
    import torch

    there = baseline.way[index]
    one = _way(seen, baseline)
    if one is None or not bool(there.isfinite().all()):
        return ""
    known = [way[index] for each in others if (way := _way(each, baseline)) is not None]
    offs = [(each - there).abs() for each in known]
    offs = [each for each in offs if bool(each.isfinite().all())]
    if known and not offs:
        return ""
    spacing = names.spacings[index] if index < len(names.spacings) else 0.0
    usual = norm(there) / max(there.numel(), 1) ** 0.5
    limit = (OF_WAY if offs else OF_WAY_ALONE) * there.abs() + NEIGHBOURS * spacing
    if offs:
        scatter = max(norm(each) for each in offs) / max(there.numel(), 1) ** 0.5
        limit = limit + FACTOR * torch.stack(offs).amax(0) + USUAL * scatter
    else:  # what stays may do so by chance only where others were led by numbers
        limit = limit + OF_USUAL_ALONE * usual * (there != 0)
    count = int((~((one[index] - there).abs() <= limit)).sum())
    return f"moved elsewhere in {count} of {there.numel()} elements" if count else ""


def _way(one: Observation, baseline: Observation) -> list[Any] | None:
    """As the baseline's, of zeros where nothing moved; None where others did."""
    if not one.way:
        return [each.new_zeros(each.shape) for each in baseline.way]
    fits = [each.shape for each in one.way] == [each.shape for each in baseline.way]
    return one.way if fits else None


def _off(seen: Observation, baseline: Observation, which: slice) -> float | None:
    """As a share of the way; None where the baseline's did not move, or others did."""
    way, mine = math.hypot(*map(norm, baseline.way[which])), _way(seen, baseline)
    if not way or not math.isfinite(way) or mine is None:
        return None
    pairs = zip(mine[which], baseline.way[which], strict=True)
    return math.hypot(*(norm(one - other) for one, other in pairs)) / way
