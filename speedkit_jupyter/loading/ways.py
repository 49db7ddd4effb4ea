"""Which ways to load are worth trying, and why others are not."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading import obstacles
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.loading.settings import PREFETCH, Settings
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FARTHER = (4, 8)
# A data set that is kept may take this share of the memory that is free.
KEPT_SHARE = 0.25
# Batches on their way lie in shared memory, of which this share may be taken.
SHARED, SHARED_SHARE = "/dev/shm", 0.5


@dataclass
class Ways:
    """For one loader on this machine. `declined` collects what is not tried, and why.

    `length` is how many batches an epoch has, where that is known; `any_order` allows what gives
    the same batches in another order, `keep` data sets that are kept in memory.
    """

    loader: DataLoader[Any]
    samples: Samples
    cores: int
    device: torch.device
    length: int | None = None
    keep: bool = True
    any_order: bool = False
    declined: dict[str, str] = field(default_factory=dict)

    def first(self) -> Iterator[Settings]:
        """The user's own; then other numbers of workers, and no loading at all."""
        own = Settings.of(self.loader)
        yield own
        yield from self._whole(own)
        yield from (one for one in self._with_workers(own) if one != own)
        yield from self._kept(own)

    def near(self, best: Settings) -> Iterator[Settings]:
        """The best of them with what changes less."""
        if best.num_workers and not best.kept:
            for factor in FARTHER:
                one = replace(best, prefetch_factor=factor)
                if one != best and not self._too_much_ahead(one):
                    yield one
            if self.any_order and best.num_workers > 1 and hasattr(self.loader, "in_order"):
                yield replace(best, in_order=False)
        if self.device.type != "cuda" or best.kept not in ("", "memory"):
            return
        if not best.pin_memory:
            yield replace(best, pin_memory=True)
        if self.samples.device == "cpu" and not best.copied_to:
            yield replace(best, pin_memory=True, copied_to=str(self.device))

    def threads_beside(self, settings: Settings) -> int | None:
        """How many threads the step should have, so that workers find a core each; None where that
        is as it is: threads wait for the one whose core a worker has.
        """
        import torch

        if self.device.type != "cpu":
            return None
        threads = max(self.cores - settings.num_workers, 1)
        return threads if threads < torch.get_num_threads() else None

    def _with_workers(self, own: Settings) -> Iterator[Settings]:
        yield replace(own, num_workers=0, prefetch_factor=None, persistent_workers=False,
                      multiprocessing_context=None)  # fmt: skip
        for number in self._numbers(own):
            one = replace(own, num_workers=number, prefetch_factor=own.prefetch_factor or PREFETCH,
                          persistent_workers=True)  # fmt: skip
            why = self._too_much_ahead(one)
            if why:
                self.declined[count(number, "worker")] = why
            else:
                yield one

    def _numbers(self, own: Settings) -> list[int]:
        """How many workers are worth trying."""
        why = obstacles.why_no_workers(self.loader, self.samples, own.multiprocessing_context)
        if why and not own.num_workers:
            self.declined["workers"] = why
            return []
        most = min(self.cores, self.length or self.cores)
        numbers = [number for number in WORKERS if number <= most]
        one_only = obstacles.why_one_worker_at_most(self.loader)
        if one_only and not (self.any_order and obstacles.asks_for_its_share(self.loader.dataset)):
            others = "2 workers or more" if own.num_workers < 2 else "other numbers of workers"
            self.declined[others] = one_only
            return [own.num_workers] if own.num_workers > 1 else [1]
        if self.cores < WORKERS[-1]:
            words = f"{count(self.cores, 'core')} may be used"
            self.declined[f"more than {count(most, 'worker')}"] = (
                words if most == self.cores else f"an epoch has {count(most, 'batch')}"
            )
        return numbers

    def _too_much_ahead(self, one: Settings) -> str:
        """Whether its batches on the way need more shared memory than there is."""
        if not (sys.platform == "linux" and os.path.isdir(SHARED)):
            return ""
        batch_bytes = self.samples.size_bytes * (self.loader.batch_size or 1)
        free = shutil.disk_usage(SHARED).free
        if one.ahead * batch_bytes <= SHARED_SHARE * free:
            return ""
        return (
            f"{one.ahead} batches on their way need {one.ahead * batch_bytes / 2**20:.0f} MiB, "
            f"{SHARED} has {free / 2**20:.0f}"
        )

    def _whole(self, own: Settings) -> Iterator[Settings]:
        """Tensors in memory take a list of indices: the batch need not be stacked of samples."""
        from torch.utils.data import TensorDataset, default_collate

        plain = self.loader.collate_fn is default_collate and self.loader.batch_sampler is not None
        if type(self.loader.dataset) is TensorDataset and plain:
            yield replace(own, num_workers=0, prefetch_factor=None, persistent_workers=False,
                          multiprocessing_context=None, whole_batches=True)  # fmt: skip

    def _kept(self, own: Settings) -> Iterator[Settings]:
        why = self.why_not_kept()
        if why:
            self.declined["kept in memory"] = why
            return
        alone = replace(own, num_workers=0, prefetch_factor=None, persistent_workers=False,
                        multiprocessing_context=None)  # fmt: skip
        yield replace(alone, kept="memory")
        if self.device.type == "cuda" and self.samples.device == "cpu":
            if self.kept_bytes <= KEPT_SHARE * _free_on(self.device):
                yield replace(alone, kept=str(self.device), pin_memory=False)
            else:
                self.declined[f"kept on {self.device}"] = self._takes

    @property
    def kept_bytes(self) -> int:
        """What all samples take, decoded."""
        return self.samples.size_bytes * len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def _takes(self) -> str:
        size = f"{self.kept_bytes / 2**20:,.0f} MiB"
        return f"its samples take {size}, more than {KEPT_SHARE:.0%} of what is free"

    def why_not_kept(self) -> str:
        """Why samples can't be kept in memory; empty where they can."""
        from torch.utils.data import TensorDataset

        dataset = self.loader.dataset
        if obstacles.is_iterable(self.loader) or not hasattr(dataset, "__len__"):
            return "an iterable data set has no samples by their indices"
        if not self.keep:
            return "not allowed (keep)"
        if self.samples.is_random:
            return "its samples differ from draw to draw (augmentation)"
        if self.samples.by_batches:
            return "what its samples are depends on their batch (__getitems__)"
        if type(dataset) is TensorDataset:
            return "it lies in memory already"
        return self._takes if self.kept_bytes > KEPT_SHARE * _free() else ""


def _free() -> int:
    """Bytes of main memory that programs may still take."""
    import psutil

    return int(psutil.virtual_memory().available)


def _free_on(device: torch.device) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
