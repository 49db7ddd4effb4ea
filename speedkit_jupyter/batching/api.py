"""Batch sizes from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching import feeds
from speedkit_jupyter.batching.batch_sizes import BatchSizes
from speedkit_jupyter.batching.feeds import Feed
from speedkit_jupyter.batching.sweep import Sweep
from speedkit_jupyter.loading.api import arguments_of, check_loader
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import in_windows
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
    """Return samples a second and peak memory of a step, for batch sizes from the first to the
    second of `sizes`, each twice the one before.

    `step` takes a batch: of `batch` (a tensor, or a tuple of several arguments) or of `loader`,
    whose samples are repeated where it has too few; or it takes none, and goes through `loader`, or
    reads tensors by their names: those of `batch`, or without one those that are alike in length.
    Loading is not timed. A size that runs out of memory is survived, and what would not fit by the
    growth of memory is not tried. Nothing is changed: another batch size is another training.
    `budget_s` is the total budget in seconds (20 without it). Raises StepError where the step can't
    be measured.
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
        given = () if batch is None else batch if isinstance(batch, tuple) else (batch,)
        return sweep_of_step(measured, loader, name, sizes, budget_s, command, given)
    if batch is None and loader is None:
        raise StepError(f"{name} takes a batch: give one, as in batch_sizes({name}, (x, y))")
    held: list[Any] = []

    def put(several: list[Any]) -> None:
        held[:] = several

    def feed() -> Feed:
        found = feeds.first_of(loader) if batch is None and loader is not None else batch
        spread = takes > 1 and isinstance(found, list | tuple)
        put(list(found) if spread else [found])
        return Feed(list(held), put, "the batch that it takes")

    measured.run = lambda _: step(*held)
    measured.others = [*measured.others, batch]
    command = command or f"batch_sizes({name}, batch)"
    return Sweep(measured, feed, BatchSizes(name, command=command), sizes, budget_s)


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
        return feeds.named(step, batch) if loader is None else feeds.through(loader)

    found = BatchSizes(name, command=command or f"batch_sizes({name})")
    return Sweep(step, feed, found, sizes, budget_s)
