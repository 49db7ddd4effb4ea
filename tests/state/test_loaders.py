"""Iterators of DataLoaders give each measured step, and then the user, the same batches."""

import os
import warnings
from collections.abc import Callable, Iterator
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from speedkit_jupyter import benchmark

DATA = torch.rand(12, 2)
KEPT = {"num_workers": 1, "persistent_workers": True}


class CountsEpochs:
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(12).tolist()

    def __len__(self) -> int:
        return 12


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from DATA[first::step]


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "a batch sampler": lambda: {
        "batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(DATA), 4, False)
    },
    "a sampler of one's own": lambda: {"sampler": CountsEpochs()},
}  # fmt: skip


def loader_of(kind: str, **more: Any) -> DataLoader[Any]:
    torch.manual_seed(3)
    return DataLoader(DATA, **{"batch_size": 3} | LOADERS[kind]() | more)


def rest(loader: DataLoader[Any], batches: Iterator[Any]) -> list[Any]:
    """Return the rest of the epoch, two more epochs, random numbers, and the sampler's epoch."""
    found = [one.tolist() for one in batches]
    more = [[one.tolist() for one in loader] for _ in range(2)]
    return [found, more, torch.rand(3).tolist(), getattr(loader.sampler, "epoch", 0)]


def measured(batches: Iterator[Any], log: Path) -> tuple[Any, str, set[str]]:
    """Benchmark a step on `batches`; return its iterator, the warnings, and the drawn batches."""
    with torch.random.fork_rng():
        model = nn.Linear(2, 1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)  # measurements don't restore files

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
@pytest.mark.parametrize("kind", LOADERS)
def test_one_that_has_yet_to_draw_its_order_is_left_alone(made_time, tmp_path, kind):
    expected = loader_of(kind)
    expected = rest(expected, iter(expected))
    loader = loader_of(kind)
    found = iter(loader)
    batches, said, seen = measured(found, tmp_path / "seen")
    assert batches is found
    assert getgeneratorstate(batches._sampler_iter) == GEN_CREATED
    assert "epoch" not in said
    assert seen == {str(expected[0][0])}
    assert rest(loader, batches) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["in order", "shuffled", "a sampler of one's own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_has_begun_goes_on_with_the_same_batches(made_time, tmp_path, kind, workers):
    def begun() -> Any:
        batches = iter(loader_of(kind, num_workers=workers))
        next(batches)
        return batches

    expected = [one.tolist() for one in begun()]
    batches, said, seen = measured(begun(), tmp_path / "seen")
    assert ("a replacement" in said) == bool(workers)
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
    trainer = SimpleNamespace(batches={"train": iter(loader)})
    return lambda: next(trainer.batches["train"])


def endless(loader: DataLoader[Any]) -> Callable[[], Any]:
    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    batches = epochs()
    next(batches)
    return lambda: next(batches)


def looped_over(loader: DataLoader[Any]) -> Callable[[], Any]:
    return lambda: sum(batch for batch in loader)


def of_lightning(loader: DataLoader[Any]) -> Callable[[], Any]:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader({"a": loader})
    batches = iter(combined)
    return lambda: next(batches)[0]["a"]


WAYS = [in_a_variable, of_a_trainer, endless, looped_over, of_lightning]


def drawn(draw: Callable[[], Any]) -> list[Any]:
    """Return up to eight batches, and the random numbers after them."""
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
    said = [one for one in said if one.category is not DeprecationWarning]  # from Python's fork
    assert bool(said) == (way is not looped_over)
