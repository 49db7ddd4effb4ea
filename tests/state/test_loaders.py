"""Iterators of DataLoaders: the same batches for each step, and afterwards for the user."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from speedkit_jupyter import benchmark

pytestmark = pytest.mark.usefixtures("made_time")

DATA = torch.rand(12, 2)
KEPT = {"num_workers": 1, "persistent_workers": True}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from DATA[first::step]


def measured(batches: Iterator[Any], log: Path) -> tuple[Any, str, set[str]]:
    """Return the step's iterator afterwards, what was said, and the batches that steps saw."""
    with torch.random.fork_rng():
        model = nn.Linear(2, 1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)  # what is written there no one takes back

    def step() -> Any:
        batch = next(batches)
        os.write(file, f"{batch.tolist()}\n".encode())
        return model(batch)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        benchmark(step, "baseline,threads:1", budget_s=0.05)
    os.close(file)
    lines = log.read_text().splitlines()
    assert len(lines) > 4
    return batches, " ".join(str(one.message) for one in said), set(lines)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_with_the_same_batches(made_time, tmp_path, shuffle, has_begun, workers):
    def made() -> Any:
        torch.manual_seed(3)
        batches = iter(DataLoader(DATA, 3, shuffle=shuffle, num_workers=workers))
        if has_begun:
            next(batches)
        return batches

    expected = [one.tolist() for one in made()]
    batches, said, seen = measured(made(), tmp_path / "seen")
    assert "an object in its place" in said
    assert seen == {str(expected[0])}
    assert [one.tolist() for one in batches] == expected


def in_a_variable(loader: DataLoader[Any]) -> Callable[[], Any]:
    batches = iter(loader)

    def draw() -> Any:
        nonlocal batches
        try:
            return next(batches)
        except StopIteration:
            batches = iter(loader)
            return next(batches)

    return draw


def of_a_trainer(loader: DataLoader[Any]) -> Callable[[], Any]:
    class Trainer:
        def __init__(self) -> None:
            self.batches = {"train": iter(loader)}

    trainer = Trainer()
    return lambda: next(trainer.batches["train"])


def looped_over(loader: DataLoader[Any]) -> Callable[[], Any]:
    return lambda: sum(batch for batch in loader)


WAYS = [in_a_variable, of_a_trainer, looped_over]


def drawn(draw: Callable[[], Any]) -> list[Any]:
    """Return as many batches as there are, and the random numbers after them."""
    batches = []
    for _ in range(8):
        try:
            batches.append(draw().tolist())
        except StopIteration:
            break
    return [*batches, torch.rand(2).tolist()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", [DATA, Stream()], ids=["samples", "a stream"])
def test_with_processes_it_goes_on_where_it_stood_however_it_is_drawn_from(made_time, way, data):
    with torch.random.fork_rng():
        model = nn.Linear(2, 1)

    def made() -> Callable[[], Any]:
        torch.manual_seed(3)
        return way(DataLoader(data, 3, shuffle=data is DATA, **KEPT))

    expected, draw = drawn(made()), made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = benchmark(lambda: model(draw()).sum().backward(), "baseline,bf16", budget_s=0.05)
    assert not found.records[1].failure
    assert drawn(draw) == expected
    assert bool(said) == (way is not looped_over)


class Ahead:
    """A loader of one's own with a thread, which counts along."""

    def __init__(self) -> None:
        self.worker, self.sent = threading.Thread(target=int), 0

    def draw(self) -> torch.Tensor:
        self.sent += 1
        return DATA[self.sent % 12]


def test_a_loader_of_ones_own_with_a_thread_is_named_and_left_alone(made_time):
    ahead, model = Ahead(), nn.Linear(2, 1)
    with pytest.warns(match=r"ahead \(Ahead\)"):
        benchmark(lambda: model(ahead.draw()), "baseline,threads:1", budget_s=0.05)
    assert ahead.sent > 2
