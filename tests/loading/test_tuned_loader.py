"""A loader with other settings gives the same samples in the same order for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

from speedkit_jupyter.loading.settings import ONCE_MORE, Settings, source
from speedkit_jupyter.loading.tuned_loader import TunedLoader, copied, end_workers, rebuilt

WORKERS = Settings(2, 2, persistent_workers=True)


class Numbers(Dataset[Any]):
    """The index, and an attribute that its user may set between epochs."""

    scale = 1.0

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index) * self.scale, 0.5])


def epochs(loader: DataLoader[Any], number: int = 2) -> list[list[Any]]:
    """The batches, and random numbers that the code between them draws."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    try:
        return [
            [(batch, torch.rand(()).item(), random.random()) for batch in loader]
            for _ in range(number)
        ]
    finally:
        end_workers(loader)


def same(one: list[list[Any]], other: list[list[Any]]) -> bool:
    ones, others = (torch.utils._pytree.tree_leaves(each) for each in (one, other))
    return len(ones) == len(others) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def samplers(data: Numbers) -> dict[str, dict[str, Any]]:
    """Ways to say which samples come next."""
    return {
        "in order": {"batch_size": 5},
        "shuffled": {"batch_size": 5, "shuffle": True},
        "batches of its own": {"batch_sampler": BatchSampler(RandomSampler(data), 6, False)},
    }


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 30),
    size=st.integers(1, 9),
    workers=st.integers(0, 2),
    prefetch=st.integers(1, 4),
    stay=st.booleans(),
    own_generator=st.booleans(),
    kept=st.booleans(),
)
def test_whatever_the_settings_the_order_is_the_users(
    length: int, size: int, workers: int, prefetch: int, stay: bool, own_generator: bool, kept: bool
) -> None:
    def made() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return DataLoader(Numbers(length), batch_size=size, shuffle=True, generator=generator)

    other = Settings(workers, prefetch if workers else None, persistent_workers=stay, kept=kept)
    assert same(epochs(made(), 3), epochs(rebuilt(made(), other), 3))


SOURCES = {
    "workers": Settings(2, 2, persistent_workers=True),
    "one that loads far ahead": Settings(1, 4, persistent_workers=True),
    "workers for each epoch": Settings(2, 2),
    "kept samples": Settings(kept=True),
    "whole batches": Settings(whole_batches=True),
}


@pytest.mark.parametrize("kind", list(SOURCES))
@pytest.mark.parametrize("how", ["in order", "shuffled", "batches of its own"])
def test_the_code_in_plain_torch_gives_what_it_stands_for_while_the_data_set_changes(
    kind: str, how: str
) -> None:
    chosen = SOURCES[kind]

    def drawn(plain_torch: bool) -> list[Any]:
        data = Numbers()
        if chosen.whole_batches:
            data = TensorDataset(torch.arange(48.0).view(24, 2))  # type: ignore[assignment]
        names = {"loader": DataLoader(data, **samplers(data)[how]), "DataLoader": DataLoader}
        code = source(names["loader"], chosen, "loader")
        anew = code.partition(ONCE_MORE)[2]
        if plain_torch:
            exec(code, names)
        else:
            names["loader"] = rebuilt(names["loader"], chosen)
        torch.manual_seed(7)
        found: list[Any] = []
        for scale in (1.0, 10.0, 10.0):
            if not chosen.whole_batches and scale != data.scale:
                data.scale = scale
                exec(anew if plain_torch else "", names)
            found.append([(batch, torch.rand(()).item()) for batch in names["loader"]])
        end_workers(names["loader"])
        return found

    assert same(drawn(plain_torch=True), drawn(plain_torch=False))


def test_whole_batches_are_those_of_single_samples() -> None:
    data = TensorDataset(torch.arange(48.0).view(24, 2), torch.arange(24))
    plain = DataLoader(data, batch_size=5, shuffle=True)
    other = rebuilt(plain, Settings(whole_batches=True))
    assert same(epochs(plain), epochs(other))
    assert len(other) == len(plain)
    assert other.batch_size == plain.batch_size


class Evens(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, self.length, 2))

    def __len__(self) -> int:
        return self.length // 2


class Named(DataLoader[Any]):
    """As libraries make them: its constructor takes what nobody else's does."""

    def __init__(self, name: str) -> None:
        super().__init__(Numbers(), batch_size=4, collate_fn=self.collated)
        self.name = name

    def collated(self, samples: list[Any]) -> Any:
        return {"x": default_collate(samples)}


def test_a_loader_of_a_class_of_its_own_stays_one() -> None:
    plain = Named("train")
    other = rebuilt(plain, WORKERS)
    assert isinstance(other, Named)
    assert isinstance(other, TunedLoader)
    assert type(other).__name__ == "Named"
    assert other.name == "train"
    assert same(epochs(plain), epochs(other))


def test_the_users_loader_is_left_alone() -> None:
    plain = DataLoader(Numbers(), batch_size=4, sampler=Evens(24))
    before = dict(plain.__dict__)
    epochs(rebuilt(plain, Settings(1, 4, persistent_workers=True)))
    assert plain.__dict__ == before


def test_workers_that_stay_see_what_was_set_between_epochs() -> None:
    data = Numbers(4)
    loader = rebuilt(DataLoader(data, batch_size=4), WORKERS)
    first = next(iter(loader))
    data.scale = 10.0
    second = next(iter(loader))
    end_workers(loader)
    assert torch.equal(second[:, 0], 10 * first[:, 0])


SAMPLES: dict[str, Any] = {
    "a tensor": torch.arange(4.0),
    "with a gradient": torch.ones(2, requires_grad=True),
    "a view": torch.arange(12.0).view(3, 4).T,
    "an array": np.arange(4),
    "nested": {"x": [torch.ones(2), (np.zeros(3), "text", None)], "y": 3},
    "objects": np.array([{"a": 1}], dtype=object),
    "of a class of its own": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("kind", list(SAMPLES))
def test_a_copy_of_a_sample_is_the_same_and_shares_nothing(kind: str) -> None:
    sample = SAMPLES[kind]
    copy = copied(sample)
    assert type(copy) is type(sample)
    before = torch.utils._pytree.tree_leaves(sample)
    for one, other in zip(before, torch.utils._pytree.tree_leaves(copy), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad
            assert one.data_ptr() != other.data_ptr()
        elif isinstance(one, np.ndarray):
            assert (one == other).all()
            assert not np.shares_memory(one, other)
        else:
            assert one == other
