"""Batch sizes from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.batch_sizes import BatchSizes
from speedkit_jupyter.batching.feeds import Feed, Given, Loaded, Named
from speedkit_jupyter.batching.sweep import Sweep
from speedkit_jupyter.loading.api import arguments_of, check_loader
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.timeit_run import device_of
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.samples import EMPTY
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

RANGE = (8, 4096)


@lets_go
@in_windows
def batch_sizes(
    step: Callable[..., object],
    batch: Any = None,
    *,
    loader: DataLoader[Any] | None = None,
    sizes: tuple[int, int] = RANGE,
    budget_s: float | None = None,
) -> BatchSizes:
    """Samples a second and peak memory of a step, for batch sizes from the first to the second of
    `sizes`, each twice the one before.

    `step` takes a batch: of `batch` (a tensor, or a tuple of several arguments) or of `loader`,
    whose samples are repeated where it has too few; or it takes none, and goes through `loader`, or
    reads tensors by their names: those of `batch`, or without one those that are alike in length.
    Loading is no part of what is timed. A size that runs out of
    memory is survived, and what would not fit by the growth of memory is not tried. Nothing is
    changed: another batch size is another training. `budget_s` are the seconds for all of it (20
    without). Raises StepError where the step can't be measured.
    """
    begun_s = clock.now()
    sweep = sweep_of(step, batch, loader, sizes, arguments.seconds("budget_s", budget_s))
    sweep.begun_s = begun_s
    for _ in sweep.run():
        pass
    return sweep.result()


def sweep_of(
    step: Callable[..., object],
    batch: Any,
    loader: DataLoader[Any] | None,
    sizes: tuple[int, int],
    budget_s: float | None,
    command: str = "",
) -> Sweep:
    """Return the sweep of a function; raises StepError."""
    if loader is not None:
        check_loader(loader)
    measured, takes = step_of(step), arguments_of(step)
    measured.others = [*measured.others, *([] if loader is None else [loader])]
    name = getattr(step, "__name__", "step")
    if not takes:
        return sweep_of_step(measured, loader, name, sizes, budget_s, command, _listed(batch))
    if batch is None and loader is None:
        raise StepError(f"{name} takes a batch: give one, as in batch_sizes({name}, (x, y))")
    held: list[Any] = [_listed(batch)]
    if takes == 1 and len(held[0]) > 1 and batch is not None:
        held = [[batch]]
    measured.run = lambda _: step(*held[0])
    measured.others = [*measured.others, *held[0]]

    def feed() -> Feed:
        if batch is None:
            assert loader is not None
            found = _first(loader)
            spread = takes > 1 and isinstance(found, list | tuple)
            held[0] = list(found) if spread else [found]
        return Given(held[0], lambda other: held.__setitem__(0, list(other)))

    return _sweep(measured, feed, name, sizes, budget_s, command or f"batch_sizes({name}, batch)")


def sweep_of_step(
    step: Step,
    loader: DataLoader[Any] | None,
    name: str,
    sizes: tuple[int, int],
    budget_s: float | None,
    command: str = "",
    batch: Sequence[Any] = (),
) -> Sweep:
    """Return the sweep of a step that gets its batches itself: from a loader, or by the names of
    tensors, which are found, or those of the `batch`. Raises StepError.
    """
    if loader is not None and batch:
        raise StepError(f"{name} takes no argument: it goes through a loader or reads a batch")

    def feed() -> Feed:
        if loader is not None:
            return Loaded(loader, _first(loader))
        apart = [t for model in step.models for t in (*model.parameters(), *model.buffers())]
        return Named(step.walk(), apart, batch)

    return _sweep(step, feed, name, sizes, budget_s, command or f"batch_sizes({name})")


def _sweep(
    step: Step,
    feed: Callable[[], Feed],
    name: str,
    sizes: tuple[int, int],
    budget_s: float | None,
    command: str,
) -> Sweep:
    least, most = (arguments.whole("sizes", size) for size in sizes)
    if not 1 <= least <= most:
        raise StepError(f"sizes must go from 1 or more upwards, not from {least} to {most}")
    device = device_of(step)
    found = BatchSizes(name, 0, "", environment=environment(device), command=command)
    return Sweep(step, feed, device, found, (least, most), budget_s)


def _listed(batch: Any) -> Sequence[Any]:
    if batch is None:
        return []
    return list(batch) if isinstance(batch, tuple) else [batch]


def _first(loader: DataLoader[Any]) -> Any:
    for batch in loader:
        return batch
    raise StepError(EMPTY)
