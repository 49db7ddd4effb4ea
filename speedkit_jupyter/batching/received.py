"""How much a step's model receives in a call: a batch size counts where that grows with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from speedkit_jupyter.measure.rounds.confinement import patched

# From one batch size to another the model receives more by this share of the (logarithmic) growth,
# at the least: inputs that are the same for every size (a table, a mask) may come beside the batch.
GROWTH = 0.5


def received(call: Callable[[], object]) -> int:
    """Make the call; return how many numbers all outermost modules in it were given."""
    import torch
    from torch.utils._pytree import tree_leaves

    numbers, depth = 0, 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal numbers, depth
            if not depth:
                leaves = tree_leaves((args, kwargs))
                numbers += sum(one.numel() for one in leaves if isinstance(one, torch.Tensor))
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return called

    with patched(torch.nn.Module, "__call__", counting):
        call()
    return numbers


def operations(call: Callable[[], object]) -> int:
    """Make the call; return how many operations its products and convolutions took."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def grows(received: float, sizes: float) -> bool:
    """Whether the model received so much more (or less) of one batch size than of another, each a
    ratio. Where nothing was counted, there is nothing to tell by.
    """
    return not received or math.log(received) / math.log(sizes) >= GROWTH
