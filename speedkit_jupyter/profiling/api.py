"""Profiling from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.profiler import Profiler
from speedkit_jupyter.support.interrupts import interruptible


@interruptible
def profile(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
) -> Profile:
    """Return where the time of `step()` goes: data, host to device, forward, backward, optimizer,
    synchronizations (with their lines), compiling, and the rest.

    The step may be a loop over a loader: it is divided by the optimizer's steps. Plain calls and
    profiled ones are made in turn for `budget_s` seconds (10 without it), at least one. Models and
    optimizers that are not given are those that the function's code reaches. Raises StepError
    where the step can't be measured; whatever happens, all that it changed is put back.
    """
    begun_s = clock.now()
    command = f"profile({getattr(step, '__name__', 'step')})"
    profiler = profiler_of(step, model, optimizer, budget_s, command)
    profiler.begun_s = begun_s
    for _ in profiler.run():
        pass
    return profiler.result()


def profiler_of(
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    budget_s: float | None,
    command: str,
    models: Mapping[int, str] = MappingProxyType({}),
) -> Profiler:
    """Return the profiler of a function; `models` are further names of models by their ids.

    Raises StepError.
    """
    called = models_of(step) | dict(models)
    return Profiler(step_of(step, model, optimizer), budget_s, command, called)


def models_of(step: Callable[..., object]) -> dict[int, str]:
    """Return the names that models have where the function was defined, by the models' ids."""
    function = inspect.unwrap(step)
    if not inspect.isfunction(function):
        return {}
    names: dict[str, Any] = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {
        id(value): name
        for name, value in reversed(names.items())
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    }
