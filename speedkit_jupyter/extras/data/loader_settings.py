"""Choose DataLoader settings to try, copy loaders with new settings, and examine samples."""

from __future__ import annotations

import copy
import io
import multiprocessing
import random
import socket
import sqlite3
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.lookup import attributes_of
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import modules
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.private import tree_map
from speedkit_jupyter.torchglue.storage import tensors_in

# Worker counts to try; none above the number of usable cores or of batches.
WORKER_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# `look_at` draws up to MOST_SAMPLES samples, and stops after LONGEST_LOOK_S seconds.
MOST_SAMPLES, LONGEST_LOOK_S = 32, 1.0
# Handles that only one process can use. Names of types need no import of their library.
HANDLES = (io.IOBase, sqlite3.Connection, sqlite3.Cursor, socket.socket)
HANDLE_MODULES = ("h5py", "lmdb", "tables", "psycopg2", "pymysql", "redis", "cv2.VideoCapture")

# Values of the arguments about workers, in a DataLoader without workers.
OF_WORKERS: dict[str, Any] = dict(  # noqa: C408
    prefetch_factor=None, persistent_workers=False, timeout=0, multiprocessing_context=None
)


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of a DataLoader that don't change its batches."""

    num_workers: int = 0
    pin_memory: bool = False
    whole_batches: bool = False  # index the data set once per batch

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderSettings:
        return cls(loader.num_workers, loader.pin_memory)

    @property
    def words(self) -> str:
        said = [count(self.num_workers, "worker")]
        said += ["pin_memory"] * self.pin_memory + ["whole batches"] * self.whole_batches
        return ", ".join(said[1:] if len(said) > 1 and not self.num_workers else said)


def is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def takes_whole_batches(loader: DataLoader[Any]) -> bool:
    """Return whether the data set, a TensorDataset, can be indexed with all indices of a batch."""
    is_plain = loader.collate_fn is default_collate and loader.batch_sampler is not None
    return is_plain and type(loader.dataset) is TensorDataset


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the loader's batch_sampler, or its sampler if automatic batching is off."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches in an epoch; None if unknown."""
    with suppress(Exception):
        return None if is_iterable(loader) else len(index_sampler(loader))
    return None


def rebuilt(loader: DataLoader[Any], settings: LoaderSettings) -> DataLoader[Any]:
    """Return a copy of the loader with other settings, without calling its constructor."""
    other = copy.copy(loader)
    modules.detach_iterator(other)
    other.num_workers = settings.num_workers
    other.prefetch_factor = loader.prefetch_factor or 2
    other.__dict__ |= {} if settings.num_workers else OF_WORKERS
    other.pin_memory = settings.pin_memory
    if settings.whole_batches:
        other.collate_fn = torch.utils.data.default_convert
        # torch refuses to set these attributes after construction.
        other.__dict__ |= {"sampler": loader.batch_sampler, "batch_sampler": None}
    return other


def begun_with(loader: Any, begin: Callable[[], Any]) -> AbstractContextManager[None]:
    """Return a context manager in which loops over this loader iterate over `begin()` instead."""
    make = lambda original: lambda asked: begin() if asked is loader else original(asked)  # noqa: E731
    return patched(DataLoader, "__iter__", make)


def end_workers(loader: DataLoader[Any]) -> None:
    """End persistent workers; the next epoch starts new ones."""
    modules.end_workers(modules.detach_iterator(loader))


def source(loader: DataLoader[Any], settings: LoaderSettings, name: str) -> str:
    """Return the user's line with new settings, such as `loader = DataLoader(…, num_workers=4)`."""
    own, kind = asdict(LoaderSettings.of(loader)), type(loader).__name__
    changed = [f"{key}={value}" for key, value in asdict(settings).items() if own[key] != value]
    only_workers = OF_WORKERS if own["num_workers"] and not settings.num_workers else {}
    changed += [f"{key}={v}" for key, v in only_workers.items() if getattr(loader, key) != v]
    given = ["…", *changed]
    if settings.whole_batches:  # a new loader with this loader's data
        given = [f"{name}.dataset", f"sampler={name}.batch_sampler", "batch_size=None"]
        given += ["pin_memory=True"] * settings.pin_memory
        given += [f"generator={name}.generator"] * (loader.generator is not None)
    return f"{name} = {kind}({', '.join(given)})"


class Samples(NamedTuple):
    """Properties of the samples of a data set."""

    is_random: bool = False  # drawing samples uses random numbers
    own_generator: str = ""  # name of the data set's own random generator, if used
    device: str = "cpu"  # device type


def look_at(loader: DataLoader[Any]) -> Samples:
    """Draw samples and return their properties. The caller must restore the state."""
    if is_iterable(loader):
        return Samples()
    # torch seeds its default generator and the generators of these functions in each worker.
    functions: list[Any] = [random.random, np.random.random_sample]
    shared = [torch.default_generator, *(function.__self__ for function in functions)]
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    walk = Walk(_drawn_with(loader))
    own = [one for one in walk.found.values() if isinstance(one, kinds) and one not in shared]
    indices = (one if isinstance(one, list | tuple) else [one] for one in index_sampler(loader))
    keys = [*islice(chain.from_iterable(indices), MOST_SAMPLES)]  # draws by samplers don't count
    before, begun_s, drawn = [*map(_state, [*shared, *own])], clock.now(), list[Any]()
    draw = user_code_boundary(lambda key: loader.dataset[key])
    for key in keys:
        if drawn and clock.now() - begun_s > LONGEST_LOOK_S:
            break
        try:
            drawn.append(draw(key))
        except Exception:
            if not loader.num_workers:
                raise
            return Samples()  # samples may need the loader's `worker_init_fn`
    states = zip([*shared, *own], before, strict=True)
    changed = [one for one, state in states if _state(one) != state]
    generator = next((walk.name(one) for one in changed if one not in shared), "")
    devices = {one.device.type for one in tensors_in(drawn)} - {"cpu"}
    return Samples(bool(changed), generator, min(devices, default="cpu"))


def _drawn_with(loader: DataLoader[Any]) -> list[Any]:
    """Return the objects that drawing uses: the data set's methods and attributes, collate_fn."""
    methods = ("__getitem__", "__getitems__", "__iter__", "__next__", "__len__")
    code = [getattr(type(loader.dataset), name, None) for name in methods]
    return [*filter(None, code), attributes_of(loader.dataset), loader.collate_fn]


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    return bytes(ForkingPickler.dumps(generator))


class IndexDataset:
    """A data set whose samples are their indices."""

    def __getitem__(self, index: Any) -> Any:
        return index


def difference(loader: DataLoader[Any], settings: LoaderSettings, settle: Callable[[], Any]) -> str:
    """Return "" if both settings give the same indices and random numbers, else a message."""
    if is_iterable(loader):  # only `pin_memory` can change
        return ""
    drawn = []
    for one in (LoaderSettings.of(loader), settings):
        settle()
        other = rebuilt(loader, one)
        other.__dict__ |= {"dataset": IndexDataset(), "collate_fn": copy.copy, "pin_memory": False}
        drawn.append(_batches(other))
    return "" if drawn[0] == drawn[1] else "its batches, their order or random numbers differ"


def _batches(loader: DataLoader[Any]) -> list[Any]:
    """Return up to 64 batches of each of two epochs, and random numbers drawn after each batch."""
    found = []
    plain = lambda index: index.tolist() if hasattr(index, "tolist") else index  # noqa: E731
    try:
        for _ in range(2):
            for batch in islice(iter(loader), 64):
                found += [tree_map(plain, batch), torch.rand(()).item()]
                found += [random.random(), float(np.random.rand())]
    finally:
        end_workers(loader)
    return found


def candidates(
    loader: DataLoader[Any], seen: Samples, cores: int, pin: bool = False
) -> tuple[list[LoaderSettings], str]:
    """Return the settings to try, and the reason for not trying other worker counts, if any."""
    own = LoaderSettings.of(loader)
    found, declined = [own], why_no_workers(loader, seen)
    if not declined:
        numbers = [one for one in WORKER_COUNTS if one <= min(cores, length(loader) or cores)]
        found = [replace(own, num_workers=number) for number in (0, *numbers)]
    if takes_whole_batches(loader):
        found.insert(0, replace(own, num_workers=0, whole_batches=True))
    found = [replace(one, pin_memory=one.pin_memory or pin) for one in found]
    return [one for one in found if one != own], declined


def why_no_workers(loader: DataLoader[Any], samples: Samples) -> str:
    """Return the reason for not trying other worker counts; empty without a reason."""
    if is_iterable(loader):
        return "an iterable data set gives other batches, or another order"
    if samples.device != "cpu":
        return f"its samples are on {samples.device}, which another process can't use"
    if samples.own_generator:
        return (
            f"{samples.own_generator} is the data set's own random generator, and each worker "
            "would draw the same numbers from its copy: torch's and numpy's differ by worker"
        )
    walk = Walk(_drawn_with(loader))
    for value in filter(_is_open_handle, walk.found.values()):
        return (
            f"{walk.name(value)} ({type(value).__name__}) is open, and workers would share it: "
            "open it at the first sample, or in worker_init_fn"
        )
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork" and not hasattr(sys.modules["__main__"], "__file__"):
        for value in (loader.dataset, *walk.found.values()):
            code = value if isinstance(value, type | FunctionType) else type(value)
            if code.__module__ == "__main__":
                return (
                    f"workers are started by {method}, which can't import notebook code: move "
                    f"{code.__qualname__} to a file and import it"
                )
    return ""


def _is_open_handle(value: Any) -> bool:
    if isinstance(value, HANDLES) and not isinstance(value, io.StringIO | io.BytesIO):
        return not getattr(value, "closed", False)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return name.startswith(HANDLE_MODULES) and not isinstance(value, type | ModuleType)
