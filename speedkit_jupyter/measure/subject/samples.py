"""How many samples a step takes, by what it calls its model with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import tree_leaves
from speedkit_jupyter.support.wrappers import layers

if TYPE_CHECKING:
    import torch


def of_a_step(step: Callable[[], object], models: Sequence[torch.nn.Module]) -> int | None:
    """Run the step once, and add up the rows (first dimension of the first tensor) of each call of
    the model that is called first, as in `model(x)`. None where no model is, or not with rows.
    """
    __tracebackhide__ = True
    import torch

    whose = {id(layer): id(model) for model in models for layer in layers(model)}
    rows: list[tuple[int, int | None]] = []
    depth = 0

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if id(module) not in whose:
                return original(module, *args, **kwargs)
            if not depth:
                rows.append((whose[id(module)], _rows((args, kwargs))))
            depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return call

    with patched(torch.nn.Module, "__call__", calling):
        step()
    found = [number for model, number in rows if model == rows[0][0]]
    known = [number for number in found if number is not None]
    return sum(known) or None if len(known) == len(found) else None


def _rows(values: Any) -> int | None:
    import torch

    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.ndim), None)
