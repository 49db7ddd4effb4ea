"""Fresh inputs: new numbers for each call, of the user's function or like an example."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.checking.calls import Drawn, Values, are_equal, inputs_of
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.torch_private import tree_map

if TYPE_CHECKING:
    import torch

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
# Below this length matrices of length by length are no large part of the memory.
SHORT = 128
# Weights differ by so much from call to call, as in training: what a candidate kept of them shows.
WEIGHTS_MOVE = 0.1
SAME = "inputs gave the same numbers twice: draw them anew, and set no seed inside"


def _check_fit(function: Any, value: Any) -> None:
    """Raise ArgumentError where the function can't be called with these."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    by_name = isinstance(value, Mapping)
    try:
        signature.bind(*(() if by_name else value), **(value if by_name else {}))
    except TypeError as error:
        raise ArgumentError(f"inputs do not fit the reference: {error}") from None


class Inputs:
    """Draws the inputs of `reference` from `source`, a function or an example."""

    def __init__(self, source: Any, reference: Callable[..., Any], weights: Values) -> None:
        self._names = _parameter_names(reference)
        self._weights = {name: value.detach().clone() for name, value in weights.items()}
        self._reference = getattr(reference, "forward", reference)
        self._moving = {n for n, t in weights.items() if t.requires_grad and t.is_floating_point()}
        self._source: Callable[..., Any] = (
            source if callable(source) else lambda: tree_map(_resampled, source)
        )
        self.takes_size = callable(source) and _takes_argument(source)

    def draw(self, seed: int, size: Any) -> Drawn:
        """Return new ones."""
        import torch

        torch.manual_seed(seed)
        value = self._source(size) if self.takes_size else self._source()
        value = (value,) if isinstance(value, torch.Tensor) else value
        if isinstance(value, Mapping | list | tuple):
            _check_fit(self._reference, value)
        if not isinstance(value, Mapping | list | tuple):
            kind = type(value).__name__
            raise ArgumentError(f"inputs must give tensors in a tuple or a dict, not {kind}")
        by_keyword = isinstance(value, Mapping)
        if isinstance(value, Mapping):
            arguments = dict(value)
        else:
            more = (f"input_{at}" for at in range(len(self._names), len(value)))
            arguments = dict(zip([*self._names, *more], value, strict=False))
        weights = {
            name: value * (1 + WEIGHTS_MOVE * torch.randn_like(value))
            if name in self._moving
            else value
            for name, value in self._weights.items()
        }
        return Drawn(arguments, by_keyword, weights=weights)

    def check_fresh(self, first: Drawn, second: Drawn) -> None:
        """Raise ArgumentError if two calls have the same numbers, but for what is constant."""
        pairs = [
            (a, b)
            for (_, a), (_, b) in zip(
                inputs_of(first.arguments), inputs_of(second.arguments), strict=True
            )
            if a.is_floating_point() and a.numel() > 1 and len(a.unique()) > 1
        ]
        if pairs and all(a.shape == b.shape and are_equal(a, b) for a, b in pairs):
            raise ArgumentError(SAME)


def cotangents(seed: int, outputs: Mapping[str, torch.Tensor]) -> Values:
    """Return random gradients of these outputs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
        for name, t in outputs.items()
    }


def growth(size: Any, before: Any) -> float | None:
    """Return at most how many times as much one size needs, if work grows with the length squared.

    What a short one needs is mostly linear. None where sizes are no shapes.
    """
    shapes = (size, before)
    if not all(isinstance(s, tuple) and all(isinstance(n, int) for n in s) for s in shapes):
        return None
    length, length_before = (shape[-2] if len(shape) > 1 else 1 for shape in shapes)
    is_short = length_before < SHORT
    longer = 1.0 if is_short else max(length / length_before, 1.0)
    return float(math.prod(size) / math.prod(before) * longer)


def _resampled(value: Any) -> Any:
    """Return other numbers from those of a floating-point tensor; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    flat = value.detach().flatten()
    if flat.numel() < 2 or not flat.isfinite().all():
        return value
    return flat[torch.randint(flat.numel(), flat.shape, device=flat.device)].reshape(value.shape)


def _parameter_names(function: Any) -> list[str]:
    try:
        return list(inspect.signature(getattr(function, "forward", function)).parameters)
    except (TypeError, ValueError):  # written in C
        return []


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in parameters)
