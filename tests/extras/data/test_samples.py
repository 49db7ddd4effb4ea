"""Check which samples are random, which can be drawn by workers, and the order of samples."""

import random
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from speedkit_jupyter import StepError, batch_sizes, tune_loader
from speedkit_jupyter.extras.data import loader_settings


class Holding(Dataset[Any]):
    """A data set that holds an object. Each sample contains `read(held)`, if `read` is given."""

    def __init__(self, held=None, read=None, length=8) -> None:
        self.held, self.read, self.length = held, read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 0.5 if self.read is None else self.read(self.held)])


def why(data: Dataset[Any], context: str = "fork") -> str:
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=context)
    return loader_settings.why_no_workers(loader, loader_settings.look_at(loader))


SHARED: dict[str, Callable[[Any], float]] = {
    "torch's": lambda _: torch.rand(()).item(),
    "Python's": lambda _: random.random(),
}
OWN: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "numpy's": (np.random.default_rng(0), lambda held: held.random()),
    "numpy's old": (np.random.RandomState(0), lambda held: held.rand()),
    "Python's own": (random.Random(0), lambda held: held.random()),
    "torch's own": (torch.Generator(), lambda held: torch.rand((), generator=held).item()),
}


@pytest.mark.parametrize("kind", [*SHARED, *OWN])
def test_random_samples_are_told_and_an_own_generator_keeps_a_loader_from_workers(kind):
    held, read = OWN.get(kind) or (None, SHARED[kind])
    assert loader_settings.look_at(DataLoader(Holding(held, read))).is_random
    assert ("random generator" in why(Holding(held, read))) == (kind in OWN)
    assert why(Holding(held)) == ""


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


def test_code_of_a_notebook_is_named_where_workers_are_spawned(monkeypatch: Any) -> None:
    made = type("Cells", (Holding,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert "move Cells to a file" in why(made([]), "spawn")
    assert why(made([]), "fork") == ""


def test_workers_are_tried_up_to_the_cores() -> None:
    loader = DataLoader(Holding(1))
    ways, declined = loader_settings.candidates(loader, loader_settings.Samples(), 3)
    assert [one.num_workers for one in ways] == [1, 2, 3]
    assert not declined


EMPTY: dict[str, Callable[[], DataLoader[Any]]] = {
    "an empty data set": lambda: DataLoader(TensorDataset(torch.ones(0, 2))),
    "drop_last": lambda: DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=4, drop_last=True),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("call", [
    lambda loader: tune_loader(loader, budget_s=1),
    lambda loader: batch_sizes(lambda x: None, loader=loader, budget_s=1),
], ids=["tune_loader", "batch_sizes"])  # fmt: skip
def test_a_loader_without_batches_gets_one_line(call: Any, name: str) -> None:
    with pytest.raises(StepError, match="gives no batch"):
        call(EMPTY[name]())


def epochs(loader: DataLoader[Any], number: int = 3) -> list[list[Any]]:
    """Return, for each epoch, every batch and the random numbers that the loop drew after it."""
    torch.manual_seed(7)
    random.seed(7)
    try:
        drawn = lambda: (torch.rand(()).item(), random.random())  # noqa: E731
        return [[(batch, drawn()) for batch in loader] for _ in range(number)]
    finally:
        loader_settings.end_workers(loader)


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@settings(max_examples=4, deadline=None)
@given(
    length=st.integers(1, 30),
    size=st.integers(1, 9),
    workers=st.integers(0, 2),
    own_generator=st.booleans(),
)
def test_whatever_the_settings_the_order_is_the_users(length, size, workers, own_generator):
    def made() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(3) if own_generator else None
        return DataLoader(Holding(length=length), batch_size=size, shuffle=True, generator=own)

    other = loader_settings.LoaderSettings(workers)
    assert_same(epochs(made()), epochs(loader_settings.rebuilt(made(), other)))


def test_the_code_says_what_is_new_in_the_users_own_line() -> None:
    own = DataLoader(TensorDataset(torch.arange(48.0).view(24, 2)), batch_size=5, num_workers=1)
    code = loader_settings.source(own, loader_settings.LoaderSettings(2, True), "loader")
    assert code == "loader = DataLoader(…, num_workers=2, pin_memory=True)"
    names = {"train": own, "DataLoader": DataLoader}
    chosen = loader_settings.LoaderSettings(whole_batches=True)
    exec(loader_settings.source(own, chosen, "train"), names)
    assert_same(epochs(names["train"]), epochs(loader_settings.rebuilt(own, chosen)))


class Named(DataLoader[Any]):
    """A loader class whose constructor takes different arguments than DataLoader."""

    def __init__(self, name: str) -> None:
        super().__init__(Holding(), batch_size=4, collate_fn=self.collated)
        self.name = name

    def collated(self, samples: list[Any]) -> Any:
        return {"x": default_collate(samples)}


def test_a_loader_of_a_class_of_its_own_stays_one_and_is_left_alone() -> None:
    plain = Named("train")
    before = dict(plain.__dict__)
    other = loader_settings.rebuilt(plain, loader_settings.LoaderSettings(2))
    assert type(other) is Named
    assert other.name == "train"
    assert_same(epochs(plain), epochs(other))
    assert plain.__dict__ == before
