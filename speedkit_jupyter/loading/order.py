"""Whether another loader gives the same samples in the same order for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.obstacles import is_iterable
from speedkit_jupyter.loading.samples import same
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.loading.tuned_loader import end_workers, rebuilt

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Of each of two epochs this many batches are compared by their indices, and this many by values.
EPOCHS, BATCHES, VALUES = 2, 64, 4


class Indices:
    """A data set that gives the index in place of the sample."""

    def __getitem__(self, index: Any) -> Any:
        return index


def as_it_is(batch: Any) -> Any:
    """Return the batch: a collate_fn of a file, which any worker can import."""
    return batch


def difference(
    loader: DataLoader[Any], settings: Settings, is_random: bool, settle: Callable[[], object]
) -> str:
    """Return in words how a loader with these settings differs; empty where it does not.

    The code between batches draws random numbers, as a step does. Of samples that are random only
    the order is compared. `settle` puts generators and samplers back to where they began.
    """

    def differ(batches: int, make: Callable[[Settings], DataLoader[Any]]) -> bool:
        drawn = []
        for one in (Settings.of(loader), settings):
            settle()
            drawn.append(_drawn(make(one), batches))
        return len(drawn[0]) != len(drawn[1]) or not all(map(same, *drawn))

    if not is_iterable(loader) and differ(BATCHES, lambda one: _only_indices(rebuilt(loader, one))):
        return "its sampler gives another order with these settings"
    if (is_iterable(loader) or not is_random) and differ(VALUES, partial(rebuilt, loader)):
        return "its batches differ with these settings"
    return ""


def _only_indices(loader: DataLoader[Any]) -> DataLoader[Any]:
    loader.__dict__ |= {"dataset": Indices(), "collate_fn": as_it_is, "pin_memory": False}
    return loader


def _drawn(loader: DataLoader[Any], batches: int) -> list[Any]:
    """Return what it gives, and random numbers that are drawn in between."""
    import numpy as np
    import torch

    found = []
    try:
        for _ in range(EPOCHS):
            for batch in islice(iter(loader), batches):
                found += [batch, torch.rand(()).item(), random.random(), float(np.random.rand())]
    finally:
        end_workers(loader)
    return found
