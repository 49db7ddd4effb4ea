"""Which ways to load are worth trying, and what keeps a loader from having workers."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedkit_jupyter.loading.samples import Samples, look_at, why_no_workers
from speedkit_jupyter.loading.tuner import first_ways


class Holding(Dataset[Any]):
    """Holds something, and may read it."""

    def __init__(self, held: Any, read: Callable[[Any], Any] | None = None) -> None:
        self.held, self.read = held, read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        value = 0.0 if self.read is None else self.read(self.held)
        return torch.tensor([index, value])


def why(data: Dataset[Any], context: str = "fork") -> str:
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=context)
    return why_no_workers(loader, look_at(loader))


OPEN: dict[str, Callable[[Path], Any]] = {
    "a file": lambda folder: (folder / "x").open("w"),
    "a database": lambda folder: sqlite3.connect(folder / "x.db", check_same_thread=False),
}


@pytest.mark.parametrize("kind", list(OPEN))
def test_what_is_open_is_not_shared_with_workers(kind: str, tmp_path: Path) -> None:
    held = OPEN[kind](tmp_path)
    found = why(Holding({"train": [held]}))
    held.close()
    assert "is open, and workers would share it" in found
    assert "held" in found
    if kind == "a file":
        assert why(Holding(held)) == ""


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
    assert why(Holding(held)) == ""


def test_code_of_a_notebook_is_named_where_workers_are_spawned(monkeypatch: Any) -> None:
    made = type("Cells", (Holding,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert "move Cells to a file" in why(made([]), "spawn")
    assert why(made([]), "fork") == ""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


def test_workers_are_tried_up_to_the_cores_and_one_for_an_iterable_data_set() -> None:
    numbers: list[list[int]] = []
    for data in (Holding(1), Stream()):
        ways, declined = first_ways(DataLoader(data), Samples(), 3)
        numbers.append([one.num_workers for one in ways if one.num_workers])
    assert numbers == [[1, 2, 3], [1]]
    assert "2 workers or more" in declined
