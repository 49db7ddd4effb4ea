"""What rounding does to a stretch that no control was run for: as to one that is like it.

Of later steps smaller samples are kept: their tensors are compared with larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.comparing.deviation import Deviation
from speedkit_jupyter.measure.checks.comparing.errors import Errors
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.values.leaves import FEW_ELEMENTS
from speedkit_jupyter.measure.checks.values.magnitudes import norm

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
    there = [index for index in known if known[index]]
    alike = [index for index in there if _outline(baseline[index]) == _outline(here)]
    if alike:
        latest = baseline[max(alike)]
        of_numbers = LIKE * _shrunk(_numbers(here), _numbers(latest))
        of_gradients = LIKE * _shrunk(_gradients(here), _gradients(latest))
        noise = _of_buffers(known)
        return [_times(errors, of_numbers, of_gradients, noise) for errors in known[max(alike)]]
    every = [errors for number in there for errors in known[number]]
    if not every:
        return []
    results = [each for errors in every for each in errors.numbers]
    gradients = [each for errors in every for each in errors.gradients]
    # A gradient may be nothing but noise, which says nothing of results where any are known.
    result = _worst(results or gradients or [errors.output for errors in every])
    gradient = _worst(gradients) if gradients else result
    made = [index for index, each in enumerate(here.gradients) if each is not None]
    return [
        Errors(
            [result] * len(_numbers(here)), [gradient] * len(made), [], result, gradient,
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
    alike = [index for index in known if index != number and _shape(baseline[index]) == here]
    return [*known[number], *(errors for index in alike for errors in known[index])]


def _shrunk(now: Sequence[torch.Tensor], then: Sequence[torch.Tensor]) -> float:
    """How many times smaller they are, if they are; of samples as large as they would be whole."""
    pairs = list(zip(now, then, strict=True))
    before = math.hypot(*map(norm, then))
    here = math.hypot(*(norm(a) * (b.numel() / max(a.numel(), 1)) ** 0.5 for a, b in pairs))
    return max(1.0, before / here) if here > 0 else 1.0


def _numbers(observation: Observation) -> list[torch.Tensor]:
    return [
        *(tensor for call in observation.calls for tensor in call.results.numbers),
        *observation.outputs.numbers,
    ]


def _gradients(observation: Observation) -> list[torch.Tensor]:
    return [gradient for gradient in observation.gradients if gradient is not None]


def _shape(observation: Observation) -> tuple[object, ...]:
    made = [None if gradient is None else gradient.shape for gradient in observation.gradients]
    return tuple(tensor.shape for tensor in _numbers(observation)), tuple(made)


def _outline(observation: Observation) -> tuple[object, ...]:
    """Its shape, but for that of tensors of which other courses may keep a sample."""
    made = [
        None if gradient is None else _whole_shape(gradient) for gradient in observation.gradients
    ]
    return tuple(map(_whole_shape, _numbers(observation))), tuple(made)


def _whole_shape(tensor: torch.Tensor) -> object:
    return tensor.shape if tensor.numel() <= FEW_ELEMENTS // 2 else "large"


def _worst(deviations: Sequence[Deviation]) -> Deviation:
    """In each of the ways in which a tensor can be off, times what is unlike."""
    distance, slope, shift = map(
        max, zip(*(deviation.values() for deviation in deviations), strict=True)
    )
    size = max(deviation.size for deviation in deviations)
    return _deviation(Deviation(size, distance, slope, shift), UNLIKE)


def _of_buffers(known: Mapping[int, Sequence[Errors]]) -> list[float | None]:
    """As in the latest stretch in which they were looked at."""
    there = [index for index in known if any(errors.buffers for errors in known[index])]
    if not there:
        return []
    kept = zip(*(errors.buffers for errors in known[max(there)] if errors.buffers), strict=False)
    values = [[value for value in buffer if value is not None] for buffer in kept]
    return [LIKE * max(buffer) if buffer else None for buffer in values]


def _times(
    errors: Errors, of_numbers: float, of_gradients: float, noise: list[float | None]
) -> Errors:
    return replace(
        errors,
        numbers=[_deviation(deviation, of_numbers) for deviation in errors.numbers],
        gradients=[_deviation(deviation, of_gradients) for deviation in errors.gradients],
        output=_deviation(errors.output, of_numbers),
        gradient=_deviation(errors.gradient, of_gradients),
        buffers=noise,
    )


def _deviation(deviation: Deviation, factor: float) -> Deviation:
    distance, slope, shift = (factor * value for value in deviation.values())
    return Deviation(deviation.size, distance, slope, shift)
