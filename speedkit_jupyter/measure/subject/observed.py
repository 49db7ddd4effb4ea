"""What is seen while a step runs: the optimizers that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.measure.subject.discovery import holds
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts

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
