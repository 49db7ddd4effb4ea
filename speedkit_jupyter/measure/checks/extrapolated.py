"""What rounding does to a stretch that no control was run for: as to one that is like it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.deviation import Deviation, Errors
from speedkit_jupyter.measure.checks.magnitudes import norm
from speedkit_jupyter.measure.checks.observation import Observation

if TYPE_CHECKING:
    import torch

# So many times what it does to the other one; and more where gradients or outputs are smaller by
# now: what they are off by is not.
LIKE, UNLIKE = 3.0, 6.0


def extrapolated(
    number: int, known: Mapping[int, Sequence[Errors]], baseline: Mapping[int, Observation]
) -> list[Errors]:
    """By the latest stretch of the same shape; else by the worst that is known at all."""
    here = baseline[number]
    there = [one for one in known if known[one]]
    alike = [one for one in there if _shape(baseline[one]) == _shape(here)]
    if alike:
        other = baseline[max(alike)]
        of_numbers = LIKE * _shrunk(_numbers(here), _numbers(other))
        of_gradients = LIKE * _shrunk(_gradients(here), _gradients(other))
        noise = _of_buffers(known)
        return [_times(one, of_numbers, of_gradients, noise) for one in known[max(alike)]]
    worst = [_worst(one) for number in there for one in known[number]]
    if not worst:
        return []
    found = _deviation(max(worst, key=lambda one: one.distance), UNLIKE)
    counts = len(_numbers(here)), sum(one is not None for one in here.gradients)
    made = [index for index, one in enumerate(here.gradients) if one is not None]
    return [
        Errors(
            [found] * counts[0], [found] * counts[1], [], found, found,
            which=made, buffers=_of_buffers(known),
        )
    ]  # fmt: skip


def with_alike(
    number: int, known: Mapping[int, Sequence[Errors]], baseline: Mapping[int, Observation]
) -> list[Errors]:
    """What rounding does to a stretch, and did to others of its shape.

    Whether it tips a ReLU over is chance: what it does in one step it may do in the next.
    """
    if not known[number]:
        return []
    here = _shape(baseline[number])
    others = [one for one in known if one != number and _shape(baseline[one]) == here]
    return [*known[number], *(each for one in others for each in known[one])]


def _shrunk(now: Sequence[torch.Tensor], then: Sequence[torch.Tensor]) -> float:
    """How many times smaller they are, if they are."""
    sizes = [math.hypot(*map(norm, each)) for each in (then, now)]
    return max(1.0, sizes[0] / sizes[1]) if sizes[1] > 0 else 1.0


def _numbers(seen: Observation) -> list[torch.Tensor]:
    return [*(one for call in seen.calls for one in call.results.numbers), *seen.outputs.numbers]


def _gradients(seen: Observation) -> list[torch.Tensor]:
    return [one for one in seen.gradients if one is not None]


def _shape(seen: Observation) -> tuple[object, ...]:
    made = [None if one is None else one.shape for one in seen.gradients]
    return tuple(one.shape for one in _numbers(seen)), tuple(made)


def _worst(seen: Errors) -> Deviation:
    """In each of the ways in which a tensor can be off."""
    ones = [*seen.numbers, *seen.gradients, seen.output, seen.gradient]
    distance, slope, shift, row, element = map(
        max, zip(*(one.values() for one in ones), strict=True)
    )
    return Deviation(max(one.size for one in ones), distance, slope, shift, row, element)


def _of_buffers(known: Mapping[int, Sequence[Errors]]) -> list[float | None]:
    """As in the latest stretch in which they were looked at."""
    there = [one for one in known if any(each.buffers for each in known[one])]
    if not there:
        return []
    kept = zip(*(one.buffers for one in known[max(there)] if one.buffers), strict=False)
    values = [[one for one in each if one is not None] for each in kept]
    return [LIKE * max(each) if each else None for each in values]


def _times(
    seen: Errors, of_numbers: float, of_gradients: float, noise: list[float | None]
) -> Errors:
    return replace(
        seen,
        numbers=[_deviation(one, of_numbers) for one in seen.numbers],
        gradients=[_deviation(one, of_gradients) for one in seen.gradients],
        output=_deviation(seen.output, of_numbers),
        gradient=_deviation(seen.gradient, of_gradients),
        buffers=noise,
    )


def _deviation(one: Deviation, factor: float) -> Deviation:
    """Which row or element is off most is another's in each: these are not compared."""
    distance, slope, shift = (factor * value for value in one.values()[:3])
    return Deviation(one.size, distance, slope, shift, row=math.inf, element=math.inf)
