"""What rounding does to a stretch that no control was run for: as to one that is like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from speedkit_jupyter.measure.deviation import Deviation, Errors
from speedkit_jupyter.measure.observation import Observation

# So many times what it does to the other one.
LIKE, UNLIKE = 2.0, 4.0


def extrapolated(
    number: int, known: Mapping[int, Sequence[Errors]], baseline: Mapping[int, Observation]
) -> list[Errors]:
    """By the latest stretch of the same shape; else by the worst that is known at all."""
    there = [one for one in known if known[one]]
    alike = [one for one in there if _shape(baseline[one]) == _shape(baseline[number])]
    if alike:
        return [_times(one, LIKE) for one in known[max(alike)]]
    worst = [_worst(one) for number in there for one in known[number]]
    if not worst:
        return []
    most = max(worst, key=lambda one: one.distance)
    numbers = len(_numbers(baseline[number]))
    gradients = sum(one is not None for one in baseline[number].gradients)
    found = _deviation(most, UNLIKE)
    return [Errors([found] * numbers, [found] * gradients, [], found, found)]


def _numbers(seen: Observation) -> list[object]:
    return [*(one for call in seen.calls for one in call.results.numbers), *seen.outputs.numbers]


def _shape(seen: Observation) -> tuple[object, ...]:
    results = [tuple(one.shape) for one in _numbers(seen)]  # type: ignore[attr-defined]
    return tuple(results), tuple(None if one is None else one.shape for one in seen.gradients)


def _worst(seen: Errors) -> Deviation:
    """In each of the ways in which a tensor can be off."""
    ones = [*seen.numbers, *seen.gradients, seen.output, seen.gradient]
    values = zip(*(one.values() for one in ones), strict=True)
    return Deviation(max(one.size for one in ones), *map(max, values))


def _times(seen: Errors, factor: float) -> Errors:
    return replace(
        seen,
        numbers=[_deviation(one, factor) for one in seen.numbers],
        gradients=[_deviation(one, factor) for one in seen.gradients],
        output=_deviation(seen.output, factor),
        gradient=_deviation(seen.gradient, factor),
    )


def _deviation(one: Deviation, factor: float) -> Deviation:
    return Deviation(one.size, *(factor * value for value in one.values()))
