"""Which elements of a parameter its gradients lead: the others an optimizer may take anywhere.

Adam divides by the size of a gradient, and makes steps of full size of what rounding left of none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.values.leaves import FEW_ELEMENTS, sampled
from speedkit_jupyter.measure.checks.values.magnitudes import norm

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation

# An element counts where its gradient is this many times as large as what it is off by; and where
# the limits are narrow, by so many.
DETERMINED, DETERMINED_EXACTLY = 10.0, 100.0
ROW_DETERMINED = 0.3
# Gradients that are off by less than this are the same.
SAME_GRADIENTS = 1e-5
# All of a parameter counts where what is led is this share of its way at least.
LEAST_SHARE_OF_ONE = 0.25


def led_elements(
    index: int,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    expected: torch.Tensor,
    before: Sequence[tuple[Observation, Observation]],
    same: bool,
) -> list[tuple[torch.Tensor, bool]]:
    """The elements that gradients lead, and whether they lead closely enough for narrow limits.

    Where all gradients are the `same` but for rounding, some of a small one may be off by more
    than that. Nothing is led where what is makes too little of the way that is `expected`.
    """
    ways = []
    for determined in (_closely_determined, _determined) if same else (_determined,):
        here = determined(mine, theirs) & were_determined(index, expected, before, determined)
        if square_of(expected[here]) >= LEAST_SHARE_OF_ONE * square_of(expected):
            ways.append((here, determined is _closely_determined))
    return ways


def is_noise(
    index: int, mine: torch.Tensor, theirs: torch.Tensor, reference: Observation | None
) -> bool:
    """Whether the baseline's gradient is what rounding left of a zero, and this one's is other.

    The bias of attention's keys has none in theory: it moves all scores of a query alike. Adam
    makes steps of full size of what is left.
    """
    if reference is None or index >= len(reference.gradients):
        return False
    exact = reference.gradients[index]
    if exact is None or exact.shape != theirs.shape:
        return False
    return norm(theirs - exact) > norm(exact) and norm(mine - theirs) > 0


def were_determined(
    index: int,
    here: torch.Tensor,
    before: Sequence[tuple[Observation, Observation]],
    determined: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The elements that had no undetermined gradient earlier, which the optimizer's averages hold.

    What an optimizer's first steps kept of one is as large as what they keep of the others.
    """
    import torch

    mask = torch.ones_like(here, dtype=torch.bool)
    for observation, baseline in before:
        if not index < min(len(observation.gradients), len(baseline.gradients)):
            continue
        mine, theirs = observation.gradients[index], baseline.gradients[index]
        if mine is None or theirs is None or mine.shape != theirs.shape:
            continue
        elements = determined(mine, theirs)
        if elements.shape != here.shape:  # of a later one fewer elements are kept
            elements = sampled(elements, FEW_ELEMENTS).bool()
        if elements.shape == here.shape:
            mask &= elements
    return mask


def _closely_determined(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where what gradients are off by is little beside the narrow limits."""
    return _determined(mine, theirs, DETERMINED_EXACTLY)


def _determined(
    mine: torch.Tensor, theirs: torch.Tensor, times: float = DETERMINED
) -> torch.Tensor:
    """No gradient is one too: of a word that did not occur, say.

    A row or column counts as a whole, since Adafactor divides by its mean.
    """
    off = mine - theirs
    here = (theirs.abs() > times * off.abs()) | ((theirs == 0) & (mine == 0))
    for dimension in (-1, -2) if theirs.dim() > 1 else ():
        size = theirs.norm(dim=dimension, keepdim=True)
        here = here & (off.norm(dim=dimension, keepdim=True) <= ROW_DETERMINED * size)
    return here


def square_of(tensor: torch.Tensor) -> float:
    """Of the norm; infinite where no float is as large, which `**` would raise on."""
    size = norm(tensor)
    return size * size
