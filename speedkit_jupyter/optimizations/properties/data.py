"""A DataLoader's part for each rank: the same epoch of samples, each once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from speedkit_jupyter.support.exceptions import SpeedKitError

# What a loader was made with, beside its data set and its order.
KEPT = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def sharded(loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Return a loader of this rank's samples; the same one where there is one process.

    Raises SpeedKitError for an order of the user's own, which can't be split.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return loader
    more = {name: getattr(loader, name) for name in KEPT}
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(_part_of()(loader.dataset), **more)
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        kind = type(loader.sampler if loader.batch_size else loader.batch_sampler).__name__
        raise SpeedKitError(f"a {kind} can't be split: give each rank a sampler of its own")
    if getattr(loader.sampler, "replacement", False):
        raise SpeedKitError("a sampler with replacement has no epoch to split")
    return DataLoader(loader.dataset, sampler=_sampler(loader), **more)


def _sampler(loader: Any) -> Any:
    """Return a sampler of every size-th index of the loader's own order.

    torch's DistributedSampler repeats samples where they do not divide evenly, and needs
    `set_epoch`; this one draws the next order by itself, the same on all ranks.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    seed = torch.randint(2**31, ())
    of_all = [seed.item()]
    dist.broadcast_object_list(of_all)

    class RankSampler(torch.utils.data.Sampler[int]):
        """This rank's indices; `epoch` counts by itself."""

        epoch = 0

        def __len__(self) -> int:
            return len(range(rank, len(loader.dataset), size))

        def __iter__(self) -> Iterator[int]:
            order = torch.arange(len(loader.dataset))
            if shuffles:
                generator = torch.Generator().manual_seed(int(of_all[0]) + self.epoch)
                order = torch.randperm(len(order), generator=generator)
            self.epoch += 1
            return iter(order[rank::size].tolist())

    return RankSampler()


def _part_of() -> Any:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    class Part(IterableDataset[Any]):
        """Every size-th sample of an iterable data set, from this rank's on."""

        def __init__(self, whole: Any) -> None:
            self.whole = whole

        def __iter__(self) -> Iterator[Any]:
            for number, sample in enumerate(self.whole):
                if number % size == rank:
                    yield sample

    return Part
