"""What another baseline begins with: another seed, or weights that were rounded once."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# Where no random number is drawn, the second baseline starts from weights that were rounded once
# as bf16 rounds: this relative step.
ROUNDING = 2.0**-9
# In units in the last place: from 3/4 to 3/2 of one, which rounds to one, up or down.
STEP = 0.75


def seed_all(seed: int) -> None:
    """Python's, torch's and, where it is in use, NumPy's generators."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def jitter(models: Sequence[torch.nn.Module]) -> None:
    """One rounding's noise on every parameter: bf16's, or a step of its own dtype where that is
    coarser.
    """
    import torch

    with torch.no_grad():
        for parameter in (p for m in models for p in m.parameters() if is_in_memory(p)):
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                wide = values if values.dtype is torch.float64 else values.float()
                noise = torch.rand_like(wide).mul_(2).sub_(1).mul_(ROUNDING)
                own = STEP * torch.finfo(values.dtype).eps
                if own > ROUNDING:  # less would be rounded away
                    noise.sign_().mul_(own)
                values.copy_(wide + wide * noise)


def own_unit(models: Sequence[torch.nn.Module]) -> float:
    """Of the coarsest dtype that the parameters have."""
    import torch

    dtypes = {parameter.dtype for model in models for parameter in model.parameters()}
    exact = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max((torch.finfo(dtype).eps / 2 for dtype in exact), default=0.0)
