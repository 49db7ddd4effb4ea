"""A loader as its user made it, with other settings."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.settings import PREFETCH, Settings
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.support.lookup import attributes_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    _Loader = DataLoader[Any]
else:  # it is mixed into torch's class, or the user's, once there is a loader
    _Loader = object

# Attributes are looked for in objects within a data set (Subset, transforms) to this depth.
DEPTH, MOST = 4, 1000
# Workers get this long to finish what they load, in looks of LOOK_S.
IDLE_S, LOOK_S = 3.0, 0.002


class TunedLoader(_Loader):
    """A loader with other settings; `tuning`, a LoaderTuning, says what was measured."""

    tuning: Any = None

    def __iter__(self) -> Any:
        """Return the iterator of an epoch."""
        prepare_epoch(self)
        return super().__iter__()


def prepare_epoch(loader: TunedLoader) -> None:
    """Make the next epoch what it would be in the user's own loader.

    Workers that stay draw one random number less for each epoch: it is drawn here, so that the
    order is that of workers that don't stay. They hold the data set as it was when they started:
    where one of its plain attributes was set since, they start anew, and kept samples are drawn
    anew.
    """
    import torch

    if loader.persistent_workers and loader.num_workers:
        now = [*plain_attributes(loader.dataset), *plain_attributes(loader.collate_fn)]
        if loader._iterator is not None and now == loader.__dict__["_attributes"]:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        else:
            end_workers(loader)
        loader.__dict__["_attributes"] = now
    if isinstance(loader.dataset, Kept):
        loader.dataset.begin()


def rebuilt(loader: DataLoader[Any], settings: Settings) -> DataLoader[Any]:
    """Return a loader like this one with other settings; all else stays, also its class.

    The attributes that torch refuses to set after construction are set in `__dict__`: so the
    constructor of a subclass, whose arguments nobody knows, is not called.
    """
    from torch.utils.data import default_convert

    other: DataLoader[Any] = object.__new__(_class_of(type(loader)))
    inside = other.__dict__
    inside |= loader.__dict__ | {
        "num_workers": settings.num_workers,
        "prefetch_factor": (settings.prefetch_factor or PREFETCH) if settings.num_workers else None,
        "persistent_workers": settings.persistent_workers and settings.num_workers > 0,
        "pin_memory": settings.pin_memory,
        "_iterator": None,
        "_attributes": None,
        "_DataLoader__multiprocessing_context": None,
    }
    if settings.multiprocessing_context is not None and settings.num_workers:
        other.multiprocessing_context = settings.multiprocessing_context
    if settings.whole_batches:
        inside |= {
            "sampler": loader.batch_sampler,
            "batch_sampler": None,
            "collate_fn": default_convert,
        }
    if settings.kept and not isinstance(loader.dataset, Kept):
        inside["dataset"] = Kept(loader.dataset)
    return other


@cache
def _class_of(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    if issubclass(kind, TunedLoader):
        return kind
    return type(kind.__name__, (TunedLoader, kind), {"__module__": kind.__module__})


def end_workers(loader: DataLoader[Any]) -> None:
    """End the workers that stay; the next epoch starts new ones."""
    iterator, loader._iterator = loader._iterator, None
    end_workers_of(iterator)


def end_workers_of(iterator: Any) -> None:
    """End the workers of a loader's iterator, if it has some."""
    shut = getattr(iterator, "_shutdown_workers", None)
    if shut is not None:
        shut()


def wait_for_workers(loader: DataLoader[Any] | None, is_iterable: bool) -> None:
    """Wait until workers that stay have loaded all that they may: the next candidate has the cores.

    At its end an iterable leaves tasks open that nobody answers: it is not waited for as long.
    """
    iterator: Any = None if loader is None else loader._iterator
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return
    until_s = clock.now() + (10 * LOOK_S if is_iterable else IDLE_S)
    with suppress(NotImplementedError):  # macOS can't tell how many wait in a queue
        while queue.qsize() < iterator._tasks_outstanding and clock.now() < until_s:
            time.sleep(LOOK_S)


def plain_attributes(value: object) -> list[tuple[str, object]]:
    """Return the numbers, words and choices that an object and those in it hold, by name."""
    return [*islice(_plain_attributes(value, DEPTH), MOST)]


def _plain_attributes(value: object, depth: int) -> Iterator[tuple[str, object]]:
    for name, held in sorted(attributes_of(value).items()) if depth else ():
        if held is None or type(held) in (bool, int, float, str):
            yield name, held
            continue
        for part in held[:DEPTH] if type(held) in (list, tuple) else [held]:  # type: ignore[index]
            yield from _plain_attributes(part, depth - 1)


class Kept:
    """A data set that draws each sample of another one once, and gives copies of it from then on.

    All other attributes are those of the data set.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._samples: dict[Any, Any] = {}
        self._attributes: Any = None

    def begin(self) -> None:
        """Begin an epoch: forget all samples if an attribute of the data set was set since the last
        sample was drawn, which may count in one itself.
        """
        if plain_attributes(self.dataset) != self._attributes:
            self._samples.clear()

    def __getitem__(self, index: Any) -> Any:
        if index not in self._samples:
            self._samples[index] = self.dataset[index]
            self._attributes = plain_attributes(self.dataset)
        return copied(self._samples[index])

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class KeptSome(Kept):
    """For measuring: a few samples stand for all, so that none has to be decoded meanwhile."""

    def __init__(self, dataset: Dataset[Any], keys: Sequence[Any]) -> None:
        super().__init__(dataset)
        self._keys = list(keys)
        self._samples = {key: dataset[key] for key in keys}

    def begin(self) -> None:
        """Begin an epoch."""

    def __getitem__(self, index: Any) -> Any:
        known = index in self._samples
        return copied(self._samples[index if known else self._keys[hash(index) % len(self._keys)]])


def copied(sample: Any) -> Any:
    """Return a copy that shares no memory. (`copy.deepcopy` of a tensor takes 90 µs, `clone` 2.)"""
    import numpy as np
    import torch

    kind = type(sample)
    if kind is torch.Tensor:
        return sample.detach().clone().requires_grad_(sample.requires_grad)
    if kind is np.ndarray and sample.dtype != object:
        return sample.copy()
    if kind in (tuple, list):
        return kind(map(copied, sample))
    if kind is dict:
        return {key: copied(value) for key, value in sample.items()}
    return copy.deepcopy(sample)
