"""A loader's iterator that has yet to draw its order: left alone, or named before the step runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.subject.from_function import step_of

DATA = torch.rand(12, 2)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class InOrderOfLuck:
    """A sampler of the user's own, which counts its epochs."""

    epoch = 0

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(12).tolist()

    def __len__(self) -> int:
        return 12


class MadeAtOnce(InOrderOfLuck):
    """Which is asked for a generator, and runs code before it gives one."""

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return (part.tolist() for part in torch.randperm(12).split(3))

    def __len__(self) -> int:
        return 4


LOADERS = {
    "in order": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "shuffled by a generator": lambda: {"batch_size": 3, "shuffle": True, "generator": own()},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
    "with replacement": lambda: {"batch_size": 3, "sampler": RandomSampler(DATA, True, 96)},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0] * 12, 12)},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, False)},
    "a sampler of one's own": lambda: {"batch_size": 3, "sampler": InOrderOfLuck()},
}


def loader_of(kind: str, workers: int = 0) -> DataLoader[Any]:
    torch.manual_seed(3)
    return DataLoader(DATA, num_workers=workers, **LOADERS[kind]())


def rest(loader: DataLoader[Any], batches: Iterator[Any]) -> list[Any]:
    """What an epoch gives, what comes after it, and how the samplers stand."""
    found = [one.tolist() for one in batches]
    more = [[one.tolist() for one in loader] for _ in range(2)]
    return [found, more, torch.rand(3).tolist(), getattr(loader.sampler, "epoch", 0)]


def measured(batches: Iterator[Any], log: Path) -> tuple[Any, str, set[str]]:
    """The iterator that the step has afterwards, what was said, and the batches that steps saw."""
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
@pytest.mark.parametrize("kind", LOADERS)
def test_it_is_as_it_was_and_gives_every_variant_the_same_batch(made_time, tmp_path, kind):
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
@pytest.mark.parametrize("kind", ["in order", "shuffled", "with replacement"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_has_begun_goes_on_with_the_same_batches(made_time, tmp_path, kind, workers):
    def begun() -> tuple[Any, Any]:
        loader = loader_of(kind, workers)
        batches = iter(loader)
        if not workers:  # those of processes draw their order by themselves when they are made
            next(batches)
        return loader, batches

    _, batches = begun()
    expected = [one.tolist() for one in batches]
    _, batches = begun()
    batches, said, seen = measured(batches, tmp_path / "seen")
    assert ("an object in its place" in said) == bool(workers)
    assert seen == {str(expected[0])}
    after = torch.get_rng_state()
    assert [one.tolist() for one in batches] == expected
    assert torch.equal(torch.get_rng_state(), after)


def test_a_cell_that_draws_from_it_meanwhile_gets_what_the_user_would():
    expected = [one.tolist() for one in iter(loader_of("shuffled"))]
    model, batches = nn.Linear(2, 1), iter(loader_of("shuffled"))
    step = step_of(lambda: model(next(batches)))
    with step.guarded() as guard:
        model(next(batches))
        with guard.paused():
            assert next(batches).tolist() == expected[0]
        model(next(batches))
    assert [one.tolist() for one in batches] == expected[1:]
