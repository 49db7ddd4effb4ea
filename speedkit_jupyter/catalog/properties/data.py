"""A DataLoader's part for each rank: the same epoch of samples, each once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.modules import detach_iterator


def sharded(loader: DataLoader[Any], keep_batch: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's samples; the same one where there is one process.

    Each batch has `batch_size` samples, or with `keep_batch` this rank's part of so many.
    Raises SpeedKitError for an order of the user's own, and for what is too small to be split.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return loader
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = loader.batch_size
    if keep_batch:
        if not batch or batch % size:
            raise SpeedKitError(f"a batch of {batch} can't be split evenly over {size} ranks")
        batch //= size
    part = copy.copy(loader)  # with all its arguments, also those of a subclass
    detach_iterator(part)
    changed: dict[str, Any] = {"batch_size": batch}
    if isinstance(loader.dataset, IterableDataset):
        changed["dataset"] = Turns(loader.dataset, rank, size, batch or 1, loader.drop_last)
        if batch:
            changed["batch_sampler"] = BatchSampler(loader.sampler, batch, loader.drop_last)
    else:
        changed["batch_sampler"] = _batches(loader, batch or 1, rank, size)
    part.__dict__ |= changed  # torch refuses to set these after construction
    return part


def _batches(loader: DataLoader[Any], batch_size: int, rank: int, size: int) -> RankBatches:
    """Return this rank's batches; raises SpeedKitError for an order that can't be split."""
    order: Any = loader.sampler
    samples = len(loader.dataset)  # type: ignore[arg-type]
    plain = type(loader.batch_sampler) is BatchSampler
    if not plain or type(order) not in (RandomSampler, SequentialSampler):
        kind = type(order if plain else loader.batch_sampler or loader).__name__
        raise SpeedKitError(f"a {kind} can't be split: give each rank a sampler of its own")
    if getattr(order, "replacement", False) or len(order) != samples:
        raise SpeedKitError("a sampler with replacement has no epoch to split")
    if samples < size:
        raise SpeedKitError(f"{count(samples, 'sample')} can't be split over {size} ranks")
    seed = [int(torch.randint(2**31, (), generator=loader.generator))]
    torch.distributed.broadcast_object_list(seed)
    shuffles = type(order) is RandomSampler
    all_of = batch_size * size
    return RankBatches(samples, all_of, loader.drop_last, shuffles, rank, size, seed[0])


@dataclass(eq=False)
class RankBatches(Sampler[list[int]]):
    """This rank's part of every batch of all ranks, in a new order each epoch.

    All ranks have as many batches, since each step waits for all of them. So the last samples, if
    they are fewer than the ranks, go with the batch before them. (torch's DistributedSampler
    repeats samples instead, and needs `set_epoch`.)
    """

    samples: int
    batch_of_all: int
    drop_last: bool
    shuffles: bool
    rank: int
    size: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_of_all)
        return whole + (rest >= self.size and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffles:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        self.epoch += 1
        edges = [number * self.batch_of_all for number in range(len(self) + 1)]
        if not self.drop_last:
            edges[-1] = self.samples
        for first, end in pairwise(edges):
            yield order[first:end][self.rank :: self.size].tolist()


@dataclass(eq=False)
class Turns(IterableDataset[Any]):
    """Every size-th sample of an iterable data set, from this rank's on.

    The last samples, if they are fewer than the ranks, are left out where they would make a batch
    on some ranks only: those would wait for the others.
    """

    whole: Any
    rank: int
    size: int
    batch_size: int
    drop_last: bool

    def __iter__(self) -> Iterator[Any]:
        samples, number = iter(self.whole), 0
        while turn := list(islice(samples, self.size)):
            if len(turn) == self.size or (number % self.batch_size and not self.drop_last):
                yield from turn[self.rank : self.rank + 1]
            number += 1
