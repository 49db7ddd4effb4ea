"""Tuning from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.functions import step_of
from speedkit_jupyter.tuning.result import Tuning
from speedkit_jupyter.tuning.search import Search

if TYPE_CHECKING:
    import torch


def tune(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float = 60.0,
    steps: int | None = None,
    objective: str = "time",
) -> Tuning:
    """Search the fastest safe plan for `step()` on this machine, by measuring.

    `budget_s` are about the seconds for it all; warm-up and compiling may exceed them. With
    `steps` the objective is the total time of so many steps, compiling included; with `objective`
    "memory" the peak of a step, at no loss of speed. Nothing is applied: `Tuning.apply()` does.
    Raises StepError where the step can't be measured; all that it changed is put back.
    """
    search = Search(step_of(step, model, optimizer), budget_s, steps, objective)
    for _ in search.run():
        pass
    return search.result()
