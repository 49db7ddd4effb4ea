"""The samples of a loader: random or not, fit for workers, the same with other settings."""

from __future__ import annotations

import copy
import io
import multiprocessing
import random
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from statistics import median
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.loader_settings import (
    LoaderSettings,
    end_workers,
    index_sampler,
    is_iterable,
    rebuilt,
)
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import attributes_of
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue.private import tree_leaves

# Up to MOST samples are drawn twice, for up to LONGEST_S: random samples differ at the first few.
MOST, LONGEST_S = 32, 1.0
# Handles that are open in one process alone; libraries by name, since they need not be installed.
HANDLES = (io.IOBase, sqlite3.Connection, sqlite3.Cursor, socket.socket)
HANDLE_MODULES = ("h5py", "lmdb", "tables", "psycopg2", "pymysql", "redis", "cv2.VideoCapture")


@dataclass(frozen=True)
class Samples:
    """Median seconds and mean bytes of a sample, and its device.

    `is_random` says whether two draws of a sample differ or use random numbers; `own_generator` is
    the name of the data set's own generator, if it has one.
    """

    draw_s: float = 0.0
    size_bytes: int = 0
    is_random: bool = False
    own_generator: str = ""
    device: str = "cpu"


def look_at(loader: DataLoader[Any]) -> Samples:
    """Draw some samples, each twice; none of an iterable data set.

    The state that drawing changes is not put back: call it while the step is isolated. Errors of
    the data set are the user's to see. Raises StepError for a StopIteration of its own.
    """
    if is_iterable(loader):
        return Samples()
    # The functions of these modules are methods of a generator that torch seeds in each worker.
    functions: list[Any] = [random.random, np.random.random_sample]
    shared = [torch.default_generator, *(function.__self__ for function in functions)]
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    walk = Walk(_drawn_with(loader))
    own = [one for one in walk.found.values() if isinstance(one, kinds) and one not in shared]
    before, begun_s = [*map(_state, own)], clock.now()
    first, drawn_s, is_random = list[Any](), list[float](), False
    for key in islice(_indices(loader), MOST):
        if first and clock.now() - begun_s > LONGEST_S:
            break
        states, at_s = [*map(_state, shared)], clock.now()
        first.append(_drawn(loader.dataset, key))
        drawn_s.append(clock.now() - at_s)
        is_same = same(first[-1], _drawn(loader.dataset, key))
        is_random |= not is_same or [*map(_state, shared)] != states
    used = (one for one, state in zip(own, before, strict=True) if _state(one) != state)
    generator = next(map(walk.name, used), "")
    leaves = tree_leaves(first)
    devices = {getattr(getattr(leaf, "device", None), "type", "cpu") for leaf in leaves} - {"cpu"}
    return Samples(
        median(drawn_s or [0.0]),
        sum(map(_size, leaves)) // max(len(first), 1),
        is_random or bool(generator),
        generator,
        min(devices, default="cpu"),
    )


def _drawn_with(loader: DataLoader[Any]) -> list[Any]:
    """Return the data set's attributes and the code that gives samples, without its constructor."""
    methods = ("__getitem__", "__getitems__", "__iter__", "__next__", "__len__")
    code = [getattr(type(loader.dataset), name, None) for name in methods]
    return [*filter(None, code), attributes_of(loader.dataset), loader.collate_fn]


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    for drawn in index_sampler(loader):
        yield from drawn if isinstance(drawn, list | tuple) else [drawn]


@user_code_boundary
def _drawn(dataset: Any, key: Any) -> Any:
    try:
        return dataset[key]
    except StopIteration:  # would look like the end of a generator of ours
        raise StepError("the data set raises StopIteration for a sample") from None


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    return bytes(ForkingPickler.dumps(generator))


def _size(leaf: Any) -> int:
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(leaf.tobytes()) if hasattr(leaf, "tobytes") else sys.getsizeof(leaf)


def same(one: Any, other: Any) -> bool:
    """Return whether two samples or batches are equal, bit for bit."""
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        try:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            return False
        return True
    if hasattr(one, "tobytes"):  # an array of NumPy's, a picture of PIL's
        has_dtype = getattr(one, "dtype", 0) == getattr(other, "dtype", 0)
        return has_dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return same(dict(one), dict(other))
    if is_dataclass(one):
        return same(attributes_of(one), attributes_of(other))
    if type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        return True  # an object of the user's without a comparison
    with suppress(Exception):  # tensors inside have no single truth value
        return bool(one == other)
    return False


class IndexDataset:
    """A data set that gives the index in place of the sample."""

    def __getitem__(self, index: Any) -> Any:
        return index


def difference(
    loader: DataLoader[Any], settings: LoaderSettings, settle: Callable[[], object]
) -> str:
    """Return the difference of a loader with these settings in words; empty if there is none.

    Code between the batches draws random numbers, as a step does. Of a data set with indices these
    alone are compared: its samples may be random. `settle` puts generators and samplers back.
    """
    inside: dict[str, Any] = {}
    if not is_iterable(loader):
        inside = {"dataset": IndexDataset(), "collate_fn": copy.copy, "pin_memory": False}
    drawn = []
    for one in (LoaderSettings.of(loader), settings):
        settle()
        other = rebuilt(loader, one)
        other.__dict__ |= inside
        drawn.append(_batches(other, 64 if inside else 4))  # indices are cheap, samples may not be
    return "" if same(*drawn) else "it gives other batches, or in another order"


def _batches(loader: DataLoader[Any], batches: int) -> list[Any]:
    """Return batches of two epochs, with random numbers that are drawn in between."""
    found = []
    try:
        for _ in range(2):
            for batch in islice(iter(loader), batches):
                found += [batch, torch.rand(()).item(), random.random(), float(np.random.rand())]
    finally:
        end_workers(loader)
    return found


def why_no_workers(loader: DataLoader[Any], samples: Samples) -> str:
    """Return the reason why a loader can't have workers; empty if it can."""
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
                    f"workers are started by {method}, which knows no code of a notebook: move "
                    f"{code.__qualname__} to a file and import it"
                )
    return ""


def _is_open_handle(value: Any) -> bool:
    if isinstance(value, HANDLES) and not isinstance(value, io.StringIO | io.BytesIO):
        return not getattr(value, "closed", False)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return name.startswith(HANDLE_MODULES) and not isinstance(value, type | ModuleType)
