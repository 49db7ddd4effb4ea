"""What is seen while a step runs: the optimizers that it makes, the samples that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.subject.discovery import holds
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.support.torch_private import tree_leaves
from speedkit_jupyter.support.wrappers import layers

if TYPE_CHECKING:
    import torch


@contextmanager
def optimizers_made(models: Sequence[torch.nn.Module]) -> Iterator[list[OptimizerFacts]]:
    """Collect the facts of each kind of optimizer that this thread makes for one of the models.

    Trainers make theirs inside the step. torch's own class tells: nothing is hooked to their steps.
    """
    import torch

    kinds: list[OptimizerFacts] = []

    def make(begin: Any) -> Callable[..., None]:
        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if holds(optimizer, models):
                facts = OptimizerFacts.read(optimizer, models)
                if facts not in kinds:
                    kinds.append(facts)

        return noted

    with patched(torch.optim.Optimizer, "__init__", make):
        yield kinds


def samples_of(step: Callable[[], object], models: Sequence[torch.nn.Module]) -> int | None:
    """Run the step once, and add up the rows (first dimension of the first tensor) of each call of
    the model that is called first. Return None if no model is called, or one without rows.
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
