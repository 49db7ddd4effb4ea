"""Loaders with processes of their own: the same batches for each step, and afterwards for the user.

What is drawn before the measurement's end is given again; nothing waits for an answer that came
before.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from speedkit_jupyter import benchmark

DATA = torch.arange(48.0).view(24, 2)
Draw = Callable[[], Any]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from DATA[first::step]


class InOrderOfLuck(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24).tolist())


class Batches(Sampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (part.tolist() for part in torch.randperm(24).split(4))


def workers(number: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": 4, "num_workers": number, **more}


KEEPS = {"persistent_workers": True}
LOADERS = {
    "one": lambda: DataLoader(DATA, **workers(1), shuffle=True),
    "one that is kept": lambda: DataLoader(DATA, **workers(1), shuffle=True, **KEEPS),
    "two that are kept": lambda: DataLoader(DATA, **workers(2), shuffle=True, **KEEPS),
    "much ahead": lambda: DataLoader(DATA, **workers(1), **KEEPS, prefetch_factor=5),
    "a stream": lambda: DataLoader(Stream(), **workers(2), **KEEPS),
    "a sampler": lambda: DataLoader(DATA, **workers(1), **KEEPS, sampler=InOrderOfLuck()),
    "batches": lambda: DataLoader(DATA, num_workers=1, batch_sampler=Batches(), **KEEPS),
}


def in_a_variable(loader: DataLoader[Any]) -> Draw:
    batches = iter(loader)

    def draw() -> Any:
        nonlocal batches
        try:
            return next(batches)
        except StopIteration:
            batches = iter(loader)
            return next(batches)

    return draw


def begun(loader: DataLoader[Any]) -> Draw:
    draw = in_a_variable(loader)
    draw()
    draw()
    return draw


class Trainer:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.batches = loader, iter(loader)

    def draw(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


def in_a_list(loader: DataLoader[Any]) -> Draw:
    row = [iter(loader)]
    return lambda: next(row[0])


def in_a_dict(loader: DataLoader[Any]) -> Draw:
    table = {"train": iter(loader)}
    return lambda: next(table["train"])


def two_of_one(loader: DataLoader[Any]) -> Draw:
    first, second = iter(loader), iter(loader)
    return lambda: next(first) + next(second)


def zipped(loader: DataLoader[Any]) -> Draw:
    pairs = zip(itertools.count(), loader, strict=False)
    return lambda: next(pairs)[1]


def numbered(loader: DataLoader[Any]) -> Draw:
    pairs = enumerate(loader)
    return lambda: next(pairs)[1]


def cycled(loader: DataLoader[Any]) -> Draw:
    batches = itertools.cycle(loader)
    return lambda: next(batches)


def cut(loader: DataLoader[Any]) -> Draw:
    batches = itertools.islice(loader, 5)
    return lambda: next(batches)


def endless(loader: DataLoader[Any]) -> Draw:
    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    batches = epochs()
    next(batches)
    return lambda: next(batches)


def looped_over(loader: DataLoader[Any]) -> Draw:
    return lambda: sum(batch for batch in loader)


def of_a_new_one(loader: DataLoader[Any]) -> Draw:
    return lambda: next(iter(loader))


def of_lightning(loader: DataLoader[Any]) -> Draw:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader({"a": loader})
    batches = iter(combined)

    def draw() -> Any:
        nonlocal batches
        try:
            return next(batches)[0]["a"]
        except StopIteration:
            batches = iter(combined)
            return next(batches)[0]["a"]

    return draw


def looped_by_lightning(loader: DataLoader[Any]) -> Draw:
    combined = pytest.importorskip("lightning.pytorch.utilities").CombinedLoader({"a": loader})
    return lambda: sum(batch[0]["a"] for batch in combined)


WAYS = [
    in_a_variable, begun, in_a_list, in_a_dict, two_of_one, zipped, numbered, cycled,
    cut, endless, looped_over, of_a_new_one, of_lightning, looped_by_lightning,
    lambda loader: Trainer(loader).draw,
]  # fmt: skip


def drawn(draw: Draw, most: int = 8) -> list[Any]:
    """As many batches as there are, and the random numbers after them."""
    batches = []
    for _ in range(most):
        try:
            batches.append(draw().tolist())
        except StopIteration:
            break
    return [*batches, torch.rand(2).tolist()]


def as_it_is_without(make: Callable[[], Draw]) -> list[str]:
    """Measures a step that draws a batch; what was said."""
    with torch.random.fork_rng():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    torch.manual_seed(3)
    expected = drawn(make())
    torch.manual_seed(3)
    draw = make()

    def step() -> Any:
        loss = model(draw()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        comparison = benchmark(step, "baseline,bf16", budget_s=0.05)
    assert not comparison.records[1].failure
    assert drawn(draw) == expected
    return [str(one.message) for one in said]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader_goes_on_where_it_stood(made_time, kind):
    said = as_it_is_without(lambda: begun(LOADERS[kind]()))
    assert "batches (_MultiProcessingDataLoaderIter) is drawn from" in said[0]
    assert "an object in its place gives the same again" in said[0]
    assert len(said) == 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_drawn_from_it_goes_on_where_it_stood(made_time, way):
    as_it_is_without(lambda: way(LOADERS["one that is kept"]()))


@pytest.mark.slow
def test_a_loop_over_a_loader_is_nothing_to_warn_of(made_time):
    assert not as_it_is_without(lambda: looped_over(LOADERS["one that is kept"]()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("renewed", [False, True])
def test_it_can_be_measured_again_and_again(made_time, renewed):
    torch.manual_seed(3)
    loader = LOADERS["one that is kept"]()
    batches, model = iter(loader), nn.Linear(2, 1)
    first = next(iter(loader)).tolist() if renewed else None
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            benchmark(lambda: model(next(batches)), "baseline,threads:1", budget_s=0.05)
    assert len(list(batches)) == (5 if first else 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        benchmark(lambda: model(next(batches, DATA)), "baseline,threads:1", budget_s=0.05)
    assert next(batches, None) is None
    assert len(list(loader)) == 6


class Ahead:
    """A loader of one's own, whose workers have its attributes."""

    def __init__(self) -> None:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self.asked, self.answers = context.Queue(), context.Queue()
        self.workers = [context.Process(target=self._answer, daemon=True)]
        self.workers[0].start()
        self.sent = self.received = 0

    def _answer(self) -> None:
        for number in iter(self.asked.get, None):
            self.answers.put((number, DATA[number % 24].tolist()))

    def draw(self) -> torch.Tensor:
        self.asked.put(self.sent)
        self.sent += 1
        number, row = self.answers.get(timeout=20)
        assert number == self.received
        self.received += 1
        return torch.tensor(row)


def test_a_loader_of_ones_own_whose_workers_count_along_is_named_and_left_alone(made_time):
    ahead, model = Ahead(), nn.Linear(2, 1)
    ahead.draw()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        benchmark(lambda: model(ahead.draw()), "baseline,threads:1", budget_s=0.05)
    assert "ahead (Ahead)" in " ".join(str(one.message) for one in said)
    ahead.draw()
    assert ahead.sent == ahead.received > 2
    ahead.asked.put(None)
    ahead.workers[0].join()
