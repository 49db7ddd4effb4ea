"""Whether the parameters went where the baseline's did, by whatever moved them: an average, say.

Every run begins a stretch with the same parameters. What the baseline leaves where it is stays
there in each of them, whatever the precision, unless a control moves it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.comparing.errors import vanish
from speedkit_jupyter.measure.checks.comparing.labels import Names
from speedkit_jupyter.measure.checks.comparing.tolerance import told_apart
from speedkit_jupyter.measure.checks.values.magnitudes import norm
from speedkit_jupyter.measure.checks.values.plain_tensors import or_nothing

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation

# So many times what the controls are off, and this share of the way more; without a control what
# goes the other way is wrong.
FACTOR, BESIDES, UNKNOWN = 4.0, 0.1, 1.5
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
    variant: Observation,
    baseline: Observation,
    controls: Sequence[Observation],
    names: Names | None = None,
    before: Sequence[Observation] = (),
) -> str:
    """How far off they went, where rounding does not explain it; empty where it does.

    `before` are earlier stretches: an optimizer goes by their gradients too.
    """
    names = names or Names()
    rest = [control for control in controls if control is not baseline]
    if fault := _left_its_place(variant, baseline, rest, names, before):
        return fault
    # All begin in the same place: where no gradient leads them, each alone is nothing but that.
    led = baseline.has_gradients() or variant.has_gradients()
    if led and any(map(vanish, (baseline, *rest))):  # an optimizer that divides goes by noise
        return ""
    single = range(0 if led else len(baseline.way))
    for which in (slice(None), *(slice(index, index + 1) for index in single)):
        share = _off(variant, baseline, which)
        shares = [_off(control, baseline, which) for control in rest]
        there = [value for value in shares if value is not None]
        # Of what rounding alone may lead anywhere nothing can be told.
        if share is None or (shares and not there) or not all(map(math.isfinite, there)):
            continue
        limit = FACTOR * max(there) + BESIDES if there else UNKNOWN
        if baseline.in_backward and which != slice(None):
            count = baseline.way[which][0].numel()
            limit += 2 * (max(1.0, FEW_ELEMENTS * count) / max(count, 1)) ** 0.5
        if not share <= limit:
            off, most = told_apart(share, limit)
            return f"the parameters went {off} of their way off, more than rounding does ({most})"
    return ""


def _left_its_place(
    variant: Observation,
    baseline: Observation,
    others: Sequence[Observation],
    names: Names,
    before: Sequence[Observation],
) -> str:
    """A parameter that no gradient leads, or led, and that stays in the baseline and in all
    controls.
    """
    leading = (variant, baseline, *(before if variant.updates else ()))  # by a momentum: it steps
    for index, count in enumerate(variant.movers):
        expected = any(_at(stretch.movers, index) for stretch in (baseline, *others))
        if count and not expected and not any(_led(index, stretch) for stretch in leading):
            return f"parameter {names.parameter(index)} moved, where it stays"
    return ""


def _led(index: int, observation: Observation) -> bool:
    gradient = observation.gradients[index] if index < len(observation.gradients) else None
    return gradient is not None and bool(gradient.any())


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def _way(observation: Observation, baseline: Observation) -> list[Any] | None:
    """As the baseline's, of zeros where nothing moved; None where others did."""
    if not observation.way:
        return [part.new_zeros(part.shape) for part in baseline.way]
    fits = [part.shape for part in observation.way] == [part.shape for part in baseline.way]
    return observation.way if fits else None


def _off(variant: Observation, baseline: Observation, which: slice) -> float | None:
    """As a share of the way; None where the baseline's did not move, or others did."""
    way, mine = math.hypot(*map(norm, baseline.way[which])), _way(variant, baseline)
    if not way or not math.isfinite(way) or mine is None:
        return None
    pairs = zip(mine[which], baseline.way[which], strict=True)
    return math.hypot(*(norm(part - expected) for part, expected in pairs)) / way
