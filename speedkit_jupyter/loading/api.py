"""Tuning a loader from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.tuner import LoaderTuner
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.timeit_run import device_of
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.samples import EMPTY
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@lets_go
@in_windows
def tune_loader(
    loader: DataLoader[Any],
    step: Callable[..., object] | None = None,
    *,
    budget_s: float | None = None,
) -> DataLoader[Any]:
    """Return the loader, rebuilt with the settings that are fastest with this step: workers,
    prefetching, pinned memory; the same samples in the same order for the same seed.

    `step` takes a batch (`step(batch)`, or `step(images, labels)` where a batch is a tuple), or
    goes through the loader itself (`step()`); without it loading alone is measured. Other settings
    are taken only where they are proven faster, else the loader that is returned has the user's
    own; its `tuning` says what was measured. `budget_s` is the total budget in seconds (20 without
    it). Raises StepError where the step can't be measured.
    Everything that it changes is put back, and no worker is left.
    """
    begun_s = clock.now()
    budget_s = arguments.seconds("budget_s", budget_s)
    check_loader(loader)
    against = "" if step is None else getattr(step, "__name__", "step")
    command = f"tune_loader(loader{f', {against}' if against else ''})"
    measured = step_over(loader, step)
    tuner = LoaderTuner(
        measured, loader, device_of(measured), budget_s, against=against, command=command
    )
    tuner.begun_s = begun_s
    for _ in tuner.run():
        pass
    return tuner.result().loader


def check_loader(loader: Any, name: str = "loader") -> None:
    """Raise StepError for what is no DataLoader of torch's."""
    from torch.utils.data import DataLoader

    if not is_a(loader, DataLoader):
        raise StepError(
            f"{name} must be a torch.utils.data.DataLoader, not {type(loader).__name__}"
        )


def step_over(loader: DataLoader[Any], step: Callable[..., object] | None = None) -> Step:
    """Return a loop over the loader that gives the step each batch, if it takes one."""
    if step is not None and not callable(step):
        raise StepError(f"the step must be a function, not {type(step).__name__}")
    if step is None:
        return Step(lambda _: loop(loader), [], others=[loader])
    measured, takes = step_of(step), arguments_of(step)
    measured.others = [*measured.others, loader]
    if takes:
        measured.run = lambda _: loop(loader, step, takes > 1)
    return measured


def loop(
    loader: DataLoader[Any], step: Callable[..., object] | None = None, spread: bool = False
) -> None:
    """Go through an epoch; a batch of several is `spread` over the arguments of the step."""
    __tracebackhide__ = True
    is_empty = True
    for batch in loader:
        is_empty = False
        if step is None:
            continue
        if spread and isinstance(batch, tuple | list):
            step(*batch)
        else:
            step(batch)
    if is_empty:
        raise StepError(EMPTY)


def arguments_of(step: Callable[..., object]) -> int:
    """Return how many arguments a step needs; a `*batch` counts as two."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some of those that are written in C
        return 1
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)
