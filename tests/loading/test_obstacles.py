"""What keeps a loader from having workers is said in one line."""

from __future__ import annotations

import random
import socket
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from speedkit_jupyter.loading.obstacles import (
    drawing,
    why_no_workers,
    why_not_picklable,
    why_one_worker_at_most,
)
from speedkit_jupyter.loading.samples import look_at
from speedkit_jupyter.measure.undo.walk import Walk


class Holding(Dataset[Any]):
    """Holds something, and may read it."""

    def __init__(self, held: Any, read: Callable[[Any], Any] | None = None) -> None:
        self.held, self.read = held, read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        value = 0.0 if self.read is None else self.read(self.held)
        return torch.tensor([index, value])


def why(data: Dataset[Any], context: str | None = "fork", **more: Any) -> str:
    loader = DataLoader(data, batch_size=2, **more)
    return why_no_workers(loader, look_at(loader, Walk(drawing(loader))), context)


def test_plain_data_has_no_obstacle() -> None:
    assert why(Holding([1, 2, 3])) == ""


OPEN: dict[str, Callable[[Path], Any]] = {
    "a file": lambda folder: (folder / "x").open("w"),
    "a binary file": lambda folder: (folder / "x").open("wb"),
    "a database": lambda folder: sqlite3.connect(folder / "x.db", check_same_thread=False),
    "a socket": lambda folder: socket.socket(),
    "in a list": lambda folder: [(folder / "x").open("w")],
    "in a dictionary": lambda folder: {"train": {"file": (folder / "x").open("w")}},
}


@pytest.mark.parametrize("kind", list(OPEN))
def test_what_is_open_is_not_shared_with_workers(kind: str, tmp_path: Path) -> None:
    held = OPEN[kind](tmp_path)
    found = why(Holding(held))
    for one in held if isinstance(held, list) else [held]:
        (one["train"]["file"] if isinstance(one, dict) else one).close()
    assert "is open, and workers would share it" in found
    assert "held" in found


def test_what_was_closed_is_no_obstacle(tmp_path: Path) -> None:
    file = (tmp_path / "x").open("w")
    file.close()
    assert why(Holding(file)) == ""


DRAWN: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "numpy's": (np.random.default_rng(0), lambda held: held.random()),
    "numpy's old": (np.random.RandomState(0), lambda held: held.rand()),
    "Python's": (random.Random(0), lambda held: held.random()),
    "torch's": (torch.Generator(), lambda held: torch.rand((), generator=held).item()),
}


@pytest.mark.parametrize("kind", list(DRAWN))
def test_a_generator_of_the_data_sets_own_would_be_the_same_in_each_worker(kind: str) -> None:
    held, read = DRAWN[kind]
    assert "random generator" in why(Holding(held, read))


@pytest.mark.parametrize("kind", list(DRAWN))
def test_a_generator_that_no_sample_draws_from_is_no_obstacle(kind: str) -> None:
    assert why(Holding(DRAWN[kind][0])) == ""


def test_what_spawned_workers_cant_be_told_is_named() -> None:
    found = why(Holding(lambda: 0), context="spawn")
    assert found.startswith("workers are started by spawn, and ")
    assert "lambda" in found


def test_classes_of_a_notebook_are_named_under_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("__main__")
    made = type("Cells", (Holding,), {"__module__": "__main__"})
    notebook.Cells = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    loader = DataLoader(made([]))
    assert "move Cells to a file" in why_not_picklable(loader, "spawn")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


class Shared(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 8, step))


def test_an_iterable_data_set_gets_one_worker_at_most() -> None:
    assert "go through all of this" in why_one_worker_at_most(DataLoader(Stream()))
    assert "another order" in why_one_worker_at_most(DataLoader(Shared()))
    assert why_one_worker_at_most(DataLoader(Holding(None))) == ""
