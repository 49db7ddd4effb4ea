"""The losses of one training step: what the step returns, and what its backward passes run on.

A loss that a GradScaler has multiplied is divided by its scale again: the scale falls and grows
while it is sought, and would hide every other difference between two curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import tree_leaves

# How many operations may lie between what a scaler gave and what backward runs on.
MOST_NODES = 64


@dataclass
class Losses:
    """`returned` is the number that the step returns, None where it returns something else;
    `ran_on` has the mean of each tensor that a backward pass began from, unscaled where it
    `was_scaled` by a GradScaler; `unit` is the coarsest relative rounding of their dtypes.
    """

    returned: float | None = None
    ran_on: list[float] = field(default_factory=list)
    was_scaled: bool = False
    unit: float = 0.0

    @property
    def total(self) -> float:
        """Of everything that backward ran on."""
        return math.fsum(self.ran_on) if all(map(math.isfinite, self.ran_on)) else sum(self.ran_on)


@contextmanager
def watched() -> Iterator[Losses]:
    """The losses of the step that runs in the block; what it `returned` is the caller's to note."""
    import torch

    losses, scales, inside = Losses(), dict[Any, float](), False

    def watching(backward: Any) -> Callable[..., Any]:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # reentrant checkpoints run a backward pass inside the backward pass
                return backward(tensors, *args, **kwargs)
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
                scale = _scale_of(tensor, scales)
                losses.ran_on.append(_mean(tensor) / scale)
                losses.was_scaled |= scale != 1.0
                losses.unit = max(losses.unit, torch.finfo(tensor.dtype).eps / 2)
            inside = True
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                inside = False

        return call

    with ExitStack() as stack:
        for scaler in _scalers():
            stack.enter_context(patched(scaler, "scale", lambda scale: _noting(scale, scales)))
        stack.enter_context(patched(torch.autograd, "backward", watching))
        yield losses


def number(result: object) -> float | None:
    """A floating-point number or tensor of one element; a count or a flag is no loss."""
    import numpy as np
    import torch

    if isinstance(result, torch.Tensor):
        whole = result.numel() != 1 or not result.is_floating_point()
        return None if whole else _mean(result)
    return float(result) if isinstance(result, float | np.floating) else None


def _scalers() -> list[type]:
    """torch's GradScaler, and each class of its kind with a way of its own to scale."""
    from torch.amp import GradScaler

    scalers: list[type] = [GradScaler]
    for scaler in scalers:
        below: list[type] = type.__subclasses__(scaler)
        scalers += [kind for kind in below if kind not in scalers]
    return [scaler for scaler in scalers if "scale" in vars(scaler)]


def _noting(scale: Any, scales: dict[Any, float]) -> Callable[..., Any]:
    """Remembers what came out, by its node in the graph."""
    import torch

    def call(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = scale(scaler, outputs, *args, **kwargs)
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        factor = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        scales.update({node: factor for node in nodes if node is not None and factor != 1.0})
        return result

    return call


def _scale_of(tensor: Any, scales: dict[Any, float]) -> float:
    """Of the nearest scaled tensor that this one was made from (`scaler.scale(loss) / 4`), or 1."""
    nodes = [tensor.grad_fn] if scales else []
    for node in nodes:
        if node in scales:
            return scales[node]
        if node is not None and len(nodes) < MOST_NODES:
            nodes += [parent for parent, _ in node.next_functions]
    return 1.0


def _mean(tensor: Any) -> float:
    import torch

    wide = tensor.detach()
    return float((wide if wide.dtype is torch.float64 else wide.float()).mean())
