"""The settings of a DataLoader in torch's own words: a loader with other settings, and its code."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
    default_convert,
)

from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import modules
from speedkit_jupyter.torchglue.confinement import patched

# torch's default (torch.utils.data.DataLoader): each worker loads this many batches ahead.
PREFETCH = 2


@dataclass(frozen=True)
class LoaderSettings:
    """Settings that change how batches are loaded, and not which batches.

    `whole_batches` draws each batch by one list of indices.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    whole_batches: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderSettings:
        """Return the settings of a loader."""
        return cls(loader.num_workers, loader.prefetch_factor, loader.pin_memory)

    def with_workers(self, number: int) -> LoaderSettings:
        """Return these settings with another number of workers."""
        factor = (self.prefetch_factor or PREFETCH) if number else None
        return replace(self, num_workers=number, prefetch_factor=factor)

    @property
    def words(self) -> str:
        """Return for example `2 workers, prefetch_factor=4`."""
        said = [count(self.num_workers, "worker")]
        if self.prefetch_factor not in (None, PREFETCH):
            said.append(f"prefetch_factor={self.prefetch_factor}")
        said += ["pin_memory"] * self.pin_memory + ["whole batches"] * self.whole_batches
        return ", ".join(said[1:] if len(said) > 1 and not self.num_workers else said)


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether the data set gives samples one after another, and none by an index."""
    return isinstance(loader.dataset, IterableDataset)


def takes_whole_batches(loader: DataLoader[Any]) -> bool:
    """Return whether samples are rows of tensors in memory, which take a list of indices."""
    is_plain = loader.collate_fn is default_collate and loader.batch_sampler is not None
    return is_plain and type(loader.dataset) is TensorDataset


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of each batch's indices, or of each sample's without batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches in an epoch; None if the data set has no length."""
    dataset: Any = loader.dataset
    with suppress(Exception):
        if not is_iterable(loader):
            return len(index_sampler(loader))
        # Not len(loader): torch would warn of longer epochs from then on.
        return math.ceil(len(dataset) / (loader.batch_size or 1))
    return None


def rebuilt(loader: DataLoader[Any], settings: LoaderSettings) -> DataLoader[Any]:
    """Return a copy of a loader, of the same class, with other settings.

    The constructor of a subclass, whose arguments are unknown, is not called.
    """
    other = copy.copy(loader)
    modules.detach_iterator(other)
    other.num_workers = settings.num_workers
    other.prefetch_factor = settings.prefetch_factor
    other.pin_memory = settings.pin_memory
    if settings.whole_batches:
        other.collate_fn = default_convert
        # torch refuses to set these after construction.
        other.__dict__ |= {"sampler": loader.batch_sampler, "batch_sampler": None}
    return other


def begun_with(loader: DataLoader[Any], begin: Callable[[], Any]) -> AbstractContextManager[None]:
    """Have loops over this loader go through the iterator that `begin` returns, in the block."""
    make = lambda original: lambda asked: begin() if asked is loader else original(asked)  # noqa: E731
    return patched(DataLoader, "__iter__", make)


def end_workers(loader: DataLoader[Any]) -> None:
    """End persistent workers; the next epoch starts new ones."""
    modules.end_workers(modules.detach_iterator(loader))


def source(loader: DataLoader[Any], settings: LoaderSettings, name: str) -> str:
    """Return the line that makes the loader with its new arguments; `…` are the old arguments."""
    own, kind = asdict(LoaderSettings.of(loader)), type(loader).__name__
    changed = [f"{key}={value}" for key, value in asdict(settings).items() if own[key] != value]
    given = ["…", *changed]
    if settings.whole_batches:  # another loader, made of this one
        given = [f"{name}.dataset", f"sampler={name}.batch_sampler", "batch_size=None"]
        given += ["pin_memory=True"] * settings.pin_memory
    return f"{name} = {kind}({', '.join(given)})"
