"""Fresh inputs: new numbers for each call, of the user's function or like an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import Drawn, seed_torch
from speedkit_jupyter.extras.check.parts import (
    UNKNOWN,
    Values,
    digest,
    form,
    is_container,
    is_record,
    laid_out,
    memory,
    tensors,
)
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.torchglue.private import tree_map

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
# Weights, and constants of an example, differ by so much from call to call, as in training: what a
# candidate kept of them shows.
MOVE = 0.1
# An input repeats if it has former numbers in more than this share of calls: a cache would gain.
REPEATS = 0.1
SAME = "inputs gave the same numbers twice: draw them anew, and set no seed inside"


class Inputs:
    """Draws the inputs of `reference` from `source`."""

    def __init__(self, source: Any, reference: Callable[..., Any], weights: Values) -> None:
        parameters = _parameters(getattr(reference, "forward", reference))
        self._names = [one.name for one in parameters]
        self._weights = {name: value.detach().clone() for name, value in weights.items()}
        self._moving = {n for n, t in weights.items() if t.requires_grad and t.is_floating_point()}
        self._source = source
        self._seen: dict[str, dict[str, list[int]]] = {}  # digests by size and name
        self.takes_size = any(
            p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in _parameters(source)
        )

    def draw(self, seed: int, size: Any) -> Drawn:
        """Return new ones."""
        seed_torch(seed)
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
        drawn = Drawn(arguments, by_keyword, weights=dict(self._weights))
        for name in self._moving:
            drawn.weights[name] = _moved(drawn.weights[name])
        self._note(drawn, size)
        return drawn

    def _note(self, drawn: Drawn, size: Any) -> None:
        """Note what tells these from others. Raises ArgumentError for what can't be drawn."""
        seen = self._seen.setdefault(repr(size), {})
        for name, part in drawn.inputs.items():
            kind, is_tensor = form(part), isinstance(part, torch.Tensor)
            if (is_tensor and kind.endswith(UNKNOWN)) or is_record(part):
                raise ArgumentError(
                    f"the input {name} is {kind.removesuffix(UNKNOWN)}: give dense tensors, in "
                    "tuples, lists and dicts, and make of them what you need inside"
                )
            if not is_container(part) and (known := digest(part)) is not None:
                seen.setdefault(name, []).append(known)

    def repeating(self, size: Any) -> list[str]:
        """Return the inputs that come again with the numbers of an earlier call."""
        seen = self._seen.get(repr(size)) or {"all of them": [0, 0]}
        return [n for n, found in seen.items() if len(found) - len({*found}) > REPEATS * len(found)]

    def check_fresh(self, drawn: Drawn, size: Any) -> None:
        """Raise ArgumentError if two calls have the same numbers, but for what is constant."""
        flat = {name: tensor.flatten() for name, tensor in tensors(drawn.inputs).items()}
        varied = {n for n, t in flat.items() if t.is_floating_point() and (t != t[:1]).any()}
        if varied and varied <= {*self.repeating(size)}:
            raise ArgumentError(SAME)


def _moved(weight: torch.Tensor) -> torch.Tensor:
    """Return other weights of the same kind: zeros among others stay."""
    noise = MOVE * torch.randn_like(weight)
    return weight * (1 + noise) if weight.any() else noise


def _resampled(value: Any) -> Any:
    """Return other numbers from those of a floating-point tensor; anything else as it is."""
    if not tensors({"": value}) or not (value.is_floating_point() or value.is_complex()):
        return value
    fresh, flat = laid_out(value), value.detach().flatten()
    if not len(flat) or value.element_size() == 1 or not flat.isfinite().all():
        return value
    flat = flat[torch.randint(len(flat), memory(fresh).shape, device=flat.device)]
    if (flat == flat[0]).all():
        flat = flat * (1 - MOVE * torch.rand_like(flat.real))
    memory(fresh).copy_(flat)
    return fresh


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, or an example
        return []
