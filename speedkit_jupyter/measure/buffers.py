"""Whether a step leaves in the models' buffers, BatchNorm's statistics say, what the baseline does.

They are taken together: one whose true value is zero holds noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.leaves import sampled
from speedkit_jupyter.measure.magnitudes import norm

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.observation import Observation

# They are wrong that are off by so much of the way they went, and of what they hold.
OF_WAY, OF_VALUES = 0.5, 0.1


def held(models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Copies of all buffers, on the CPU."""
    return [sampled(one) for model in models for one in model.buffers()]


def misled(seen: Observation, baseline: Observation) -> str:
    """What is wrong with the buffers after the step; empty where nothing is."""
    before, mine, theirs = baseline.buffers_before, seen.buffers, baseline.buffers
    shapes = [[one.shape for one in each] for each in (before, mine, theirs)]
    if any(each != shapes[0] for each in shapes):
        return ""
    off, way, size = [], [], []
    for start, one, other in zip(before, mine, theirs, strict=True):
        if not other.is_floating_point():
            if other.numel() == 1 and not bool((one == other).all()):
                return f"a buffer counts {int(one)} instead of {int(other)}"
        elif bool(other.isfinite().all()):
            off.append(norm(one - other))
            way.append(norm(other - start))
            size.append(norm(other))
    distance = math.hypot(*off)
    if distance <= OF_WAY * math.hypot(*way) or distance <= OF_VALUES * math.hypot(*size):
        return ""
    return f"buffers off by {distance / math.hypot(*size):.2g} after the step" if any(size) else ""
