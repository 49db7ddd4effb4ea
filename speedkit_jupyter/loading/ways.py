"""Which ways to load are worth trying, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading import obstacles
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FARTHER = (4, 8)
# A data set that is kept may take this share of the memory that is free.
KEPT_SHARE = 0.25


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
        """Give the user's own; then other numbers of workers, and no loading at all."""
        own = Settings.of(self.loader)
        yield own
        yield from self._whole(own)
        yield from (one for one in self._with_workers(own) if one != own)
        yield from self._kept(own)

    def near(self, best: Settings) -> Iterator[Settings]:
        """Give variations of the best of them."""
        if best.num_workers and not best.kept:
            factors = [factor for factor in FARTHER if factor != best.prefetch_factor]
            yield from (replace(best, prefetch_factor=factor) for factor in factors)
            if self.any_order and best.num_workers > 1 and hasattr(self.loader, "in_order"):
                yield replace(best, in_order=False)
        if self.device.type != "cuda":
            return
        if not best.pin_memory:
            yield replace(best, pin_memory=True)
        if self.samples.device == "cpu" and not best.copied_to:
            yield replace(best, pin_memory=True, copied_to=str(self.device))

    def _with_workers(self, own: Settings) -> Iterator[Settings]:
        yield own.without_workers()
        yield from map(own.with_workers, self._numbers(own))

    def _numbers(self, own: Settings) -> list[int]:
        """Return how many workers are worth trying."""
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

    def _whole(self, own: Settings) -> Iterator[Settings]:
        """Tensors in memory take a list of indices: the batch need not be stacked of samples."""
        from torch.utils.data import TensorDataset, default_collate

        plain = self.loader.collate_fn is default_collate and self.loader.batch_sampler is not None
        if type(self.loader.dataset) is TensorDataset and plain:
            yield own.without_workers(whole_batches=True)

    def _kept(self, own: Settings) -> Iterator[Settings]:
        why = self.why_not_kept()
        if why:
            self.declined["kept in memory"] = why
            return
        yield own.without_workers(kept=True)

    @property
    def kept_bytes(self) -> int:
        """What all samples take, decoded."""
        return self.samples.size_bytes * len(self.loader.dataset)  # type: ignore[arg-type]

    def why_not_kept(self) -> str:
        """Return why samples can't be kept in memory; empty where they can."""
        import psutil
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
        if self.kept_bytes > KEPT_SHARE * psutil.virtual_memory().available:
            size = f"{self.kept_bytes / 2**20:,.0f} MiB"
            return f"its samples take {size}, more than {KEPT_SHARE:.0%} of what is free"
        return ""
