"""Fresh inputs: new numbers for each call, of the user's function or like an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from speedkit_jupyter.checking.calls import Drawn, Values, are_equal, inputs_of
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.torch_private import tree_map

# Shapes by name: batch, heads, length, head_dim. One row, an odd length, and what models have.
SIZES: dict[str, Any] = {
    "single": (1, 1, 1, 16),
    "small": (1, 2, 16, 16),
    "odd": (2, 3, 37, 24),
    "realistic": (2, 8, 512, 64),
    "large": (4, 16, 1024, 64),
    "xlarge": (8, 32, 2048, 128),
}
GIVEN = "given"
# Weights differ by so much from call to call, as in training: what a candidate kept of them shows.
WEIGHTS_MOVE = 0.1
SAME = "inputs gave the same numbers twice: draw them anew, and set no seed inside"


class Inputs:
    """Draws the inputs of `reference` from `source`, a function or an example."""

    def __init__(self, source: Any, reference: Callable[..., Any], weights: Values) -> None:
        parameters = _parameters(getattr(reference, "forward", reference))
        self._names = [one.name for one in parameters]
        self._weights = {name: value.detach().clone() for name, value in weights.items()}
        self._moving = {n for n, t in weights.items() if t.requires_grad and t.is_floating_point()}
        self._source = source
        self.takes_size = any(
            p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in _parameters(source)
        )

    def draw(self, seed: int, size: Any) -> Drawn:
        """Return new ones."""
        torch.manual_seed(seed)
        if callable(self._source):
            value = self._source(size) if self.takes_size else self._source()
        else:
            value = tree_map(_resampled, self._source)
        value = (value,) if isinstance(value, torch.Tensor) else value
        if not isinstance(value, Mapping | list | tuple):
            kind = type(value).__name__
            raise ArgumentError(f"inputs must give tensors in a tuple or a dict, not {kind}")
        more = (f"input_{at}" for at in range(len(self._names), len(value)))
        by_keyword = isinstance(value, Mapping)
        arguments = dict(value if by_keyword else zip([*self._names, *more], value, strict=False))
        weights = dict(self._weights)
        for name in self._moving:
            weights[name] = weights[name] * (1 + WEIGHTS_MOVE * torch.randn_like(weights[name]))
        return Drawn(arguments, by_keyword, weights=weights)

    def check_fresh(self, first: Drawn, second: Drawn) -> None:
        """Raise ArgumentError if two calls have the same numbers, but for what is constant."""
        both = zip(inputs_of(first.arguments), inputs_of(second.arguments), strict=True)
        pairs = [(a, b) for (_, a), (_, b) in both if a.is_floating_point() and len(a.unique()) > 1]
        if pairs and all(a.shape == b.shape and are_equal(a, b) for a, b in pairs):
            raise ArgumentError(SAME)


def _resampled(value: Any) -> Any:
    """Return other numbers from those of a floating-point tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    flat = value.detach().flatten()
    if flat.numel() < 2 or not flat.isfinite().all():
        return value
    return flat[torch.randint(flat.numel(), flat.shape, device=flat.device)].reshape(value.shape)


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, or an example
        return []
