"""Advice from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.advice import Advice
from speedkit_jupyter.advice.advisor import Advisor
from speedkit_jupyter.loading.api import arguments_of, loop
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.profiling.api import profiler_of
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


@lets_go
@in_windows
def advise(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loader: DataLoader[Any] | None = None,
    budget_s: float | None = None,
) -> Advice:
    """Return what would make `step()` faster: opportunities with their evidence, the expected
    speed-up of the whole step, the risk, and what to write.

    A step that takes a batch needs the `loader` that gives it: a call is an epoch then. It is
    profiled for `budget_s` seconds (10 without it) as `profile` does, one more call is watched, and
    every rule is asked. Models, optimizers and loaders that are not given are those that the
    function's code reaches. Nothing is changed. Raises StepError where the step can't be measured.
    """
    begun_s = clock.now()
    budget_s = arguments.seconds("budget_s", budget_s)
    name = getattr(step, "__name__", "step")
    step = over_batches(step, loader, name, "give loader=…")
    profiler = profiler_of(step, model, optimizer, budget_s, f"advise({name})")
    profiler.begun_s = begun_s
    advisor = Advisor(profiler, loaders=[] if loader is None else [loader], subject=name)
    for _ in advisor.run():
        pass
    return advisor.result()


def over_batches(
    step: Callable[..., object], loader: DataLoader[Any] | None, name: str, advice: str
) -> Callable[..., object]:
    """Return an epoch of the loader for a step that takes batches; another step as it is."""
    takes = arguments_of(step) if callable(step) else 0
    if not takes or _is_context(step):
        return step
    if loader is None:
        words = "a batch" if takes == 1 else f"{takes} arguments"
        raise StepError(f"{name} takes {words}: {advice}, or name a function that takes none")
    return partial(loop, loader, step, takes > 1)


def _is_context(step: Callable[..., object]) -> bool:
    """Return whether what it takes is SpeedKit's own, as in a benchmark."""
    parameters = [*inspect.signature(step).parameters.values()] if arguments_of(step) == 1 else []
    return bool(parameters) and parameters[0].name in ("ctx", "context")
