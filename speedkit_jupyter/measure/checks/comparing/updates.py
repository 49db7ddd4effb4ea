"""Whether the optimizer did with its gradients what it does in the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.comparing.labels import Names
from speedkit_jupyter.measure.checks.comparing.led_by_gradients import (
    SAME_GRADIENTS,
    is_noise,
    led_elements,
    square_of,
)
from speedkit_jupyter.measure.checks.values.magnitudes import norm

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation

# Parameters that move less or more than this share of the baseline's step did other work.
LEAST_MOVE, MOST_MOVE = 0.2, 5.0
# All of them together, and those of one parameter, follow the baseline's within these shares.
OFF, OFF_EXACTLY, PARAMETER_OFF = 0.1, 0.01, 0.5
# The difference of both ways, over the baseline's: what stays is as far off as what goes astray.
ASTRAY, ASTRAY_EXACTLY = 0.35, 0.05
# With so many elements at least, or half of a small parameter, and so large a share of the way.
LEAST_ELEMENTS, LEAST_SHARE = 16, 0.1
# Updates that differ by no more of the parameters' neighbouring numbers are the same.
NEIGHBOURS = 2.0
# What moves less than this share of the usual way may be the noise of a zero, and round away.
LEAST_WAY = 1e-3
# And off by more than this may lead anywhere.
OTHER_GRADIENTS = 0.5


def untrained(observation: Observation, baseline: Observation, names: Names) -> str:
    """Which parameter stays where it is for no reason; empty where none does."""
    if len(observation.updates) != len(baseline.updates):
        return "the optimizer made no step" if baseline.updates else ""
    way = sum(map(square_of, baseline.updates))
    usual = way / max(sum(update.numel() for update in baseline.updates), 1)
    for index, (update, expected) in enumerate(
        zip(observation.updates, baseline.updates, strict=True)
    ):
        gradient = observation.gradients[index]
        leads = gradient is None or bool(gradient.any())
        moves = square_of(expected) > LEAST_WAY**2 * usual * expected.numel()
        if moves and leads and not bool(update.any()):
            return f"{names.parameter(index)} is not trained"
    return ""


def misstep(
    observation: Observation,
    baseline: Observation,
    names: Names | None = None,
    before: Sequence[tuple[Observation, Observation]] = (),
    reference: Observation | None = None,
) -> str:
    """What is wrong with how the parameters moved; empty where nothing is.

    `before` are earlier stretches of both: an optimizer goes by their gradients too. `reference`
    says which gradients are zero but for the baseline's own rounding.
    """
    names = names or Names()
    if baseline.updates and len(observation.updates) != len(baseline.updates):
        return "the optimizer made no step"
    if len(observation.updates) != len(baseline.updates):
        return "" if baseline.moved else "the parameters moved, where they stay"
    times = observation.moved / baseline.moved if baseline.moved > 0 else 1.0
    gradients = [_apart(*pair) for pair in ((observation, baseline), *before)]
    # Whether they are so close that they lead as far; a momentum keeps earlier ones too.
    led = all(off <= OTHER_GRADIENTS * size for off, size in gradients)
    if led and not LEAST_MOVE < times < MOST_MOVE:
        return f"the parameters moved {times:.2g} times as far"
    same = all(off <= SAME_GRADIENTS * size for off, size in gradients)
    along = total = way = 0.0
    for index, (update, expected) in enumerate(
        zip(observation.updates, baseline.updates, strict=True)
    ):
        mine, theirs = observation.gradients[index], baseline.gradients[index]
        way += square_of(expected)
        if mine is None or theirs is None or not update.shape == mine.shape == theirs.shape:
            continue
        update = _stored(
            update, expected, names.spacings[index] if index < len(names.spacings) else 0.0
        )
        ways = led_elements(index, mine, theirs, expected, before, same)
        noise = is_noise(index, mine, theirs, reference)
        if not ways or noise or not (same or names.by_element):
            # what it moves by is led by elements that rounding leads
            stays = bool(expected.any()) and not bool(update.any())
            if stays and norm(mine) > LEAST_MOVE * norm(theirs):
                return f"parameter {names.parameter(index)} stays where it was"
            continue
        if fault := _led_elsewhere(update, expected, ways):
            return f"parameter {names.parameter(index)} {fault}"
        here, closely = ways[0]
        if closely or not same:
            along += float((update * expected)[here].sum())
            total += square_of(expected[here])
    if total > LEAST_SHARE * way and _differs(along, total, OFF_EXACTLY if same else OFF):
        return f"the optimizer's step is {along / total:.3g} times the baseline's"
    return ""


def _led_elsewhere(
    update: torch.Tensor,
    expected: torch.Tensor,
    ways: Sequence[tuple[torch.Tensor, bool]],
) -> str:
    """What is wrong with how the elements of one parameter moved that gradients lead."""
    for here, closely in ways:
        if fault := _misled(update[here], expected[here], update.numel(), closely):
            return fault
    return ""


def _stored(update: torch.Tensor, expected: torch.Tensor, spacing: float) -> torch.Tensor:
    """The same where both differ by no more than what adding it to the parameter rounds."""
    import torch

    return torch.where((update - expected).abs() <= NEIGHBOURS * spacing, expected, update)


def _misled(update: torch.Tensor, expected: torch.Tensor, size: int, closely: bool) -> str:
    """What is wrong with how the determined elements of one parameter moved."""
    count, norms = update.numel(), (norm(update), norm(expected))
    if count < min(LEAST_ELEMENTS, size / 2) or not any(norms):
        return ""
    if not norms[1]:
        return "moved, where it stays"
    dot, square = float((update * expected).sum()), square_of(expected)
    if _differs(dot, square, PARAMETER_OFF):
        return f"moved {dot / square:.2g} times as far"
    astray = norm(update - expected) / norms[1]
    limit = ASTRAY_EXACTLY if closely else ASTRAY
    return "" if astray <= limit else f"moved elsewhere, by {astray:.2g} of its way"


def _apart(observation: Observation, baseline: Observation) -> tuple[float, float]:
    """How far the gradients differ, and how large they are."""
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(observation.gradients, baseline.gradients, strict=False)
        if mine is not None and theirs is not None and mine.shape == theirs.shape
    ]
    return (
        math.hypot(*(norm(mine - theirs) for mine, theirs in pairs)),
        math.hypot(*(norm(theirs) for _, theirs in pairs)),
    )


def _differs(dot: float, square: float, limit: float) -> bool:
    return square > 0 and not abs(dot / square - 1) <= limit
