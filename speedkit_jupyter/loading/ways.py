"""Which ways to load are worth trying, and why others are not."""

from __future__ import annotations

import io
import math
import multiprocessing
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.samples import Samples, drawing, index_sampler, is_iterable
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FARTHER = (4, 8)
# What is open for one process alone; libraries by name, which need not be installed.
HANDLES = (io.IOBase, sqlite3.Connection, sqlite3.Cursor, socket.socket)
HANDLE_MODULES = ("h5py", "lmdb", "tables", "psycopg2", "pymysql", "redis", "cv2.VideoCapture")


@dataclass
class Ways:
    """Settings that are worth trying for a loader. `declined` collects what is not tried, and why.

    `length` is how many batches an epoch has, where that is known.
    """

    loader: DataLoader[Any]
    samples: Samples
    cores: int
    device: torch.device
    length: int | None = None
    declined: dict[str, str] = field(default_factory=dict)

    def first(self) -> Iterator[Settings]:
        """Give whole batches, and other numbers of workers."""
        from torch.utils.data import TensorDataset, default_collate

        own = Settings.of(self.loader)
        plain = self.loader.collate_fn is default_collate and self.loader.batch_sampler is not None
        # Tensors in memory take a list of indices: the batch need not be stacked of samples.
        if type(self.loader.dataset) is TensorDataset and plain:
            yield replace(own.with_workers(0), whole_batches=True)
        workers = (own.with_workers(number) for number in self._numbers(own))
        yield from (one for one in (own.with_workers(0), *workers) if one != own)

    def near(self, best: Settings) -> Iterator[Settings]:
        """Give variations of the best of them."""
        if best.num_workers:
            factors = [factor for factor in FARTHER if factor != best.prefetch_factor]
            yield from (replace(best, prefetch_factor=factor) for factor in factors)
        if self.device.type == "cuda" and not best.pin_memory:
            yield replace(best, pin_memory=True)

    def _numbers(self, own: Settings) -> list[int]:
        """Return how many workers are worth trying."""
        why = why_no_workers(self.loader, self.samples)
        if why and not own.num_workers:
            self.declined["workers"] = why
            return []
        if is_iterable(self.loader):
            others = "2 workers or more" if own.num_workers < 2 else "other numbers of workers"
            self.declined[others] = "of an iterable data set they give other batches, or an order"
            return [max(own.num_workers, 1)]
        most = min(self.cores, self.length or self.cores)
        if self.cores < WORKERS[-1]:
            self.declined[f"more than {count(most, 'worker')}"] = (
                f"{count(self.cores, 'core')} may be used"
                if most == self.cores
                else f"an epoch has {count(most, 'batch')}"
            )
        return [number for number in WORKERS if number <= most]


def length(loader: DataLoader[Any]) -> int | None:
    """Return it in batches; None where the data set says none.

    The loader of an iterable is not asked: it would warn of longer epochs from then on.
    """
    dataset: Any = loader.dataset
    with suppress(Exception):  # an iterable's length is its user's to give, or not
        if not is_iterable(loader):
            return len(index_sampler(loader))
        size = loader.batch_size or 1
        return len(dataset) // size if loader.drop_last else math.ceil(len(dataset) / size)
    return None


def why_no_workers(loader: DataLoader[Any], samples: Samples) -> str:
    """Return a line; empty where it can have some."""
    if samples.device != "cpu":
        return f"its samples lie on {samples.device}, which another process has no part in"
    if samples.own_generator:
        return (
            f"{samples.own_generator} is the data set's own random generator, and each worker "
            "would draw the same numbers from its copy: torch's and numpy's differ by worker"
        )
    walk = Walk(drawing(loader))
    for value in filter(_is_open_handle, walk.found.values()):
        return (
            f"{walk.name(value)} ({type(value).__name__}) is open, and workers would share it: "
            "open it at the first sample, or in worker_init_fn"
        )
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork" and not hasattr(sys.modules["__main__"], "__file__"):
        for value in map(_code_of, (loader.dataset, *walk.found.values())):
            if value.__module__ == "__main__":
                return (
                    f"workers are started by {method}, which knows no code of a notebook: move "
                    f"{value.__qualname__} to a file and import it"
                )
    return ""


def _code_of(value: Any) -> Any:
    return value if isinstance(value, type | FunctionType) else type(value)


def _is_open_handle(value: Any) -> bool:
    """Return whether it is a file, a connection or such that is open."""
    if isinstance(value, HANDLES) and not isinstance(value, io.StringIO | io.BytesIO):
        return not getattr(value, "closed", False)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name.startswith(HANDLE_MODULES) and not isinstance(value, type | ModuleType)
