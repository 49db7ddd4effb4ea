"""Whether a step leaves in the models' buffers, BatchNorm's statistics say, what the baseline does.

Each on its own: beside a large queue a small moving average would not be seen. How far one may be
off is a share of the way that it went, and what the rounding of a control does to it: one whose
true way is zero holds noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.values.leaves import sampled
from speedkit_jupyter.measure.checks.values.magnitudes import norm

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation

# So much of its way one may be off by: where a control has gone it too; and where none has, since
# it moves after the optimizer's step, and Adam's divides by what is noise.
OF_WAY, OF_WAY_ALONE = 0.05, 0.5
# Times what the controls are off: in float32 kernels add up in another order, and of a mean that
# is zero only this is left. And so many roundings to float32 of what it holds.
FACTOR, FACTOR_FLOAT32 = 8.0, 64.0
ROUNDINGS, FLOAT32 = 64.0, 2.0**-24
# What lies beside a mean and says how large the numbers are that it is the mean of, to which power.
SCATTERS = {"var": 0.5, "std": 1.0}
# So many whole numbers may differ where rounding has another sample counted elsewhere, of as many.
FEW, OF_MANY = 4, 40
# A step that is run again leaves the same but for so much of the way.
ALIKE = 1e-3


def held(models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Copies of all buffers, on the CPU."""
    return [sampled(buffer) for model in models for buffer in model.buffers()]


def labels(models: Sequence[torch.nn.Module]) -> list[str]:
    """Their names, in the same order."""
    several = len(models) > 1
    return [
        f"{type(model).__name__}.{name}" if several else name
        for model in models
        for name, _ in model.named_buffers()
    ]


def off_from(observation: Observation, reference: Observation) -> list[float | None]:
    """How far each is off; None where nothing moved it, or they don't fit."""
    distances: list[float | None] = []
    if not len(observation.buffers) == len(reference.buffers) == len(reference.buffers_before):
        return distances
    for start, buffer, expected in zip(
        reference.buffers_before, observation.buffers, reference.buffers, strict=True
    ):
        fits = buffer.shape == expected.shape == start.shape
        # One that rests in this stretch may hold what an earlier one rounded.
        if not fits or bool((expected == start).all() and (buffer == expected).all()):
            distances.append(None)
        else:
            distances.append(_off(buffer, expected))
    return distances


def settle(again: Observation, first: Observation) -> None:
    """Empties those of the first run that the same step leaves with other values each time."""
    together = zip(first.buffers_before, again.buffers, first.buffers, strict=False)
    for index, (start, buffer, expected) in enumerate(together):
        alike = buffer.shape == expected.shape == start.shape
        limit = ALIKE * _off(expected, start) if alike and _is_float(expected) else 0.0
        if not alike or not _off(buffer, expected) <= limit:
            first.buffers[index] = expected.new_empty(0)


def misled(
    observation: Observation,
    baseline: Observation,
    names: Sequence[str] = (),
    noise: Sequence[float | None] = (),
    lowered: bool = True,
) -> str:
    """What is wrong with the buffers after the step; empty where nothing is.

    `noise` is what controls are off by, `lowered` whether the precision is.
    """
    import torch

    together = zip(baseline.buffers_before, observation.buffers, baseline.buffers, strict=False)
    for index, (start, buffer, expected) in enumerate(together):
        if buffer.numel() and not expected.numel():  # another one each time
            continue
        start = start if start.shape == expected.shape else torch.zeros_like(expected)
        level = noise[index] if index < len(noise) else None
        if buffer.shape != expected.shape:
            fault = f"has the shape {tuple(buffer.shape)} instead of {tuple(expected.shape)}"
        elif not _is_float(expected):
            fault = _miscounted(buffer, expected, start, level or 0.0, lowered)
        elif not bool(expected.isfinite().all()):
            fault = ""
        elif level is None:
            besides = _follows(observation, baseline, expected) + _cancelled(index, names, baseline)
            fault = _astray(buffer, expected, start, OF_WAY_ALONE, besides)
        else:
            besides = level * (FACTOR if lowered else FACTOR_FLOAT32)
            besides += _cancelled(index, names, baseline)
            fault = _astray(buffer, expected, start, OF_WAY, besides)
        if fault:
            return f"buffer {names[index] if index < len(names) else index + 1} {fault}"
    return ""


def _miscounted(
    buffer: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, noise: float, lowered: bool
) -> str:
    """Counts, masks, pointers: exact but where rounding decides what is counted where."""
    off, way = _off(buffer, expected), _off(expected, start)
    if buffer.numel() == 1:
        return f"counts {int(buffer)} instead of {int(expected)}" if off > 2 * noise else ""
    limit = 2 * noise + 3 * noise**0.5 + 0.02 * way if noise else 0.0
    balanced = int(buffer.sum()) == int(expected.sum())
    if lowered and balanced and way >= OF_MANY:
        limit = max(limit, FEW)
    if off <= limit:
        return ""
    count = int((buffer != expected).sum())
    return (
        f"differs in {count} of {buffer.numel()} whole numbers after the step, by {off:.3g} in all"
    )


def _astray(
    buffer: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, share: float, besides: float
) -> str:
    """Statistics and averages, as a whole."""
    difference, step = buffer - expected, expected - start
    off, way, size = norm(difference), norm(step), norm(expected)
    besides += ROUNDINGS * FLOAT32 * size
    wrong = not off <= share * way + besides
    if not wrong:
        return ""
    if not math.isfinite(off):
        return "is not finite after the step"
    if not way:
        return f"changed by {off / size:.2g} of its size, where it stays" if size else "changed"
    return f"is off by {off / way:.2g} times what the step changes in it"


def _follows(observation: Observation, baseline: Observation, buffer: torch.Tensor) -> float:
    """A moving average of a parameter is off by what that is off by."""
    return max(
        (
            norm(update - expected)
            for update, expected in zip(observation.updates, baseline.updates, strict=False)
            if update.shape == expected.shape == buffer.shape
        ),
        default=0.0,
    )


def _cancelled(index: int, names: Sequence[str], baseline: Observation) -> float:
    """What float32 leaves of a mean that is zero, as behind another normalization: kernels that
    add up in another order leave something else, by the size of the numbers, not of their mean.
    """
    before, mean, after = names[index].rpartition("mean") if index < len(names) else ("", "", "")
    if not mean:
        return 0.0
    mine = baseline.buffers[index].shape
    beside = dict(zip(names, baseline.buffers, strict=False))
    for word, power in SCATTERS.items():
        scatter = beside.get(f"{before}{word}{after}")
        if scatter is not None and scatter.shape == mine and bool(scatter.isfinite().all()):
            return ROUNDINGS * FLOAT32 * norm(scatter.abs() ** power)
    return 0.0


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _off(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference; of whole numbers the sum of what they differ by."""
    if _is_float(other):
        return norm(tensor - other)
    return float((tensor.double() - other.double()).abs().sum())
