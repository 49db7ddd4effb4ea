"""Why a loader can't have workers, or not others than it has."""

from __future__ import annotations

import inspect
import io
import math
import socket
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_start_method
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.lookup import attributes_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# What is open for one process alone; libraries by name, which need not be installed.
HANDLES = (io.IOBase, sqlite3.Connection, sqlite3.Cursor, socket.socket)
HANDLE_MODULES = ("h5py", "lmdb", "tables", "psycopg2", "pymysql", "redis", "cv2.VideoCapture")


def why_no_workers(loader: DataLoader[Any], samples: Samples, context: str | None) -> str:
    """One line; empty where it can have some, started by `context`."""
    if samples.device != "cpu":
        return f"its samples lie on {samples.device}, which another process has no part in"
    if samples.own_generator:
        return (
            f"{samples.own_generator} is the data set's own random generator, and each worker "
            "would draw the same numbers from its copy: torch's and numpy's differ by worker"
        )
    if samples.why_not_sent:
        return samples.why_not_sent
    walk = Walk(drawing(loader))
    for value in walk.found.values():
        if is_open_handle(value):
            return (
                f"{walk.name(value)} ({type(value).__name__}) is open, and workers would share it: "
                "open it at the first sample, or in worker_init_fn"
            )
    method = context or get_start_method()
    return "" if method == "fork" else why_not_picklable(loader, method)


def is_open_handle(value: Any) -> bool:
    """Whether it is a file, a connection or such that is open."""
    if isinstance(value, io.StringIO | io.BytesIO):
        return False
    if isinstance(value, HANDLES):
        return not getattr(value, "closed", False)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name.startswith(HANDLE_MODULES) and not isinstance(value, type | ModuleType)


def drawing(loader: DataLoader[Any]) -> list[Any]:
    """What a sample is drawn with: what the data set holds, and its code for that.

    Not its other methods: what made it is no part of it.
    """
    dataset = loader.dataset
    methods = ("__getitem__", "__getitems__", "__iter__", "__next__", "__len__")
    code = [getattr(type(dataset), name, None) for name in methods]
    return [*filter(None, code), attributes_of(dataset), loader.collate_fn]


def choosing(loader: DataLoader[Any]) -> list[Any]:
    """What says which samples come next. torch's own samplers keep nothing but a generator."""
    samplers = [loader.sampler, loader.batch_sampler]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    own = [one for one in samplers if not type(one).__module__.startswith("torch.utils.data")]
    return [loader.generator, *(getattr(one, "generator", None) for one in samplers), *own]


class _Reader(ForkingPickler):
    """Pickles without values, and notes what only this notebook knows."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.here = list[str]()

    def persistent_id(self, value: Any) -> str | None:
        """Large values need not be written to know that they can be."""
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor | np.ndarray):
            return "values"
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.here.append(value.__qualname__)
        return None


def why_not_sent(loader: DataLoader[Any], keys: Sequence[Any]) -> str:
    """Why a worker can't send a batch, made of a few samples; empty where it can. A worker that
    can't says nothing, and is waited for.
    """
    samples = [loader.dataset[key] for key in keys]
    in_batches = loader.batch_sampler is not None
    batch: Any = loader.collate_fn(samples if in_batches else samples[0])  # type: ignore[arg-type]
    try:
        _Reader().dump(batch)
    except Exception as error:
        return f"a worker can't send its batches: {_first_line(error)}"
    return ""


def why_not_picklable(loader: DataLoader[Any], method: str) -> str:
    """Why workers that begin with nothing (spawn, forkserver) can't be told the data set."""
    reader = _Reader()
    try:
        reader.dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    except Exception as error:
        return f"workers are started by {method}, and {_first_line(error)}"
    if reader.here and not hasattr(sys.modules["__main__"], "__file__"):
        return (
            f"workers are started by {method}, which knows no classes of a notebook: move "
            f"{reader.here[0]} to a file and import it"
        )
    return ""


def why_one_worker_at_most(loader: DataLoader[Any]) -> str:
    """Of an iterable data set; empty for others."""
    if not is_iterable(loader):
        return ""
    if asks_for_its_share(loader.dataset):
        return "of an iterable data set each number of workers gives another order (any_order)"
    return "each worker would go through all of this iterable data set (no get_worker_info in it)"


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether its data set gives samples one after another, and none by an index."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what gives the indices of each batch, or of each sample without batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


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


def asks_for_its_share(dataset: Any) -> bool:
    """Whether its code asks torch which worker it is in."""
    return any("get_worker_info" in names for names in _names_in(type(dataset)))


def _names_in(kind: type) -> Iterator[tuple[str, ...]]:
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch.utils.data"):
            return
        for _, function in inspect.getmembers(base, inspect.isfunction):
            yield function.__code__.co_names
            for constant in function.__code__.co_consts:
                yield getattr(constant, "co_names", ())


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line[:1].lower() + line[1:] if line else type(error).__name__
