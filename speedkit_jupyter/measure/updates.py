"""Whether the optimizer did with its gradients what it does in the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedkit_jupyter.measure.magnitudes import norm

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.observation import Observation

# Parameters that move less or more than this share of the baseline's step did other work.
LEAST_MOVE, MOST_MOVE = 0.2, 5.0
# An element counts where its gradient is this many times as large as what it is off by: Adam
# divides by it, so that the others go anywhere.
DETERMINED = 10.0
# All of them together, and those of one parameter, follow the baseline's within these shares.
OFF, OFF_EXACTLY, PARAMETER_OFF = 0.1, 0.01, 0.5
# With so many elements at least, and so large a share of the baseline's way.
LEAST_ELEMENTS, LEAST_SHARE = 16, 0.1
# Gradients that are off by less than this are the same.
SAME_GRADIENTS = 1e-5


def misstep(seen: Observation, baseline: Observation) -> str:
    """What is wrong with how the parameters moved; empty where nothing is."""
    if baseline.moved > 0 and not LEAST_MOVE < seen.moved / baseline.moved < MOST_MOVE:
        return f"the parameters moved {seen.moved / baseline.moved:.2g} times as far"
    if not baseline.updates:
        return ""
    if len(seen.updates) != len(baseline.updates):
        return "the optimizer made no step"
    along = total = way = off = size = 0.0
    for index, (one, other) in enumerate(zip(seen.updates, baseline.updates, strict=True)):
        mine, theirs = seen.gradients[index], baseline.gradients[index]
        way += _square(other)
        if mine is None or theirs is None or not one.shape == mine.shape == theirs.shape:
            continue
        off += _square(mine - theirs)
        size += _square(theirs)
        here = _determined(mine, theirs)
        dot, square = float((one * other)[here].sum()), float((other[here] ** 2).sum())
        if int(here.sum()) >= LEAST_ELEMENTS and _differs(dot, square, PARAMETER_OFF):
            return f"parameter {index + 1} moved {dot / square:.2g} times as far"
        along, total = along + dot, total + square
    limit = OFF_EXACTLY if off <= SAME_GRADIENTS**2 * size else OFF
    if total > LEAST_SHARE * way and _differs(along, total, limit):
        return f"the optimizer's step is {along / total:.3g} times the baseline's"
    return ""


def _square(tensor: torch.Tensor) -> float:
    """Of the norm; infinite where no float is as large, which `**` would raise on."""
    size = norm(tensor)
    return size * size


def _differs(dot: float, square: float, limit: float) -> bool:
    return square > 0 and not abs(dot / square - 1) <= limit


def _determined(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (theirs.abs() > DETERMINED * (mine - theirs).abs()) & (theirs != 0)
