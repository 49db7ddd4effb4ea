"""A loader with other settings gives the same samples in the same order for the same seed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from speedkit_jupyter.loading.samples import same
from speedkit_jupyter.loading.settings import Settings, end_workers, rebuilt, source


class Numbers(Dataset[Any]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 0.5])


def epochs(loader: DataLoader[Any], number: int = 3) -> list[list[Any]]:
    """The batches, and random numbers that the code between them draws."""
    torch.manual_seed(7)
    random.seed(7)
    try:
        return [
            [(batch, torch.rand(()).item(), random.random()) for batch in loader]
            for _ in range(number)
        ]
    finally:
        end_workers(loader)


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 30),
    size=st.integers(1, 9),
    workers=st.integers(0, 2),
    prefetch=st.integers(1, 4),
    own_generator=st.booleans(),
)
def test_whatever_the_settings_the_order_is_the_users(
    length: int, size: int, workers: int, prefetch: int, own_generator: bool
) -> None:
    def made() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return DataLoader(Numbers(length), batch_size=size, shuffle=True, generator=generator)

    other = Settings(workers, prefetch if workers else None)
    assert same(epochs(made()), epochs(rebuilt(made(), other)))


@pytest.mark.parametrize(
    "chosen", [Settings(2, 2), Settings(1, 4), Settings(whole_batches=True)], ids=str
)
@pytest.mark.parametrize("how", ["in order", "shuffled", "batches of its own"])
def test_the_code_in_plain_torch_gives_what_it_stands_for(chosen: Settings, how: str) -> None:
    data: Any = TensorDataset(torch.arange(48.0).view(24, 2))
    given: dict[str, dict[str, Any]] = {
        "in order": {"batch_size": 5, "drop_last": True},
        "shuffled": {"batch_size": 5, "shuffle": True},
        "batches of its own": {"batch_sampler": BatchSampler(RandomSampler(data), 6, False)},
    }
    own = DataLoader(data, **given[how])
    names = {"loader": own, "DataLoader": DataLoader}
    exec(source(own, chosen, "loader"), names)
    made = rebuilt(own, chosen)
    assert same(epochs(names["loader"]), epochs(made))
    assert same(epochs(own), epochs(made))
    assert len(made) == len(own)


class Named(DataLoader[Any]):
    """As libraries make them: its constructor takes what nobody else's does."""

    def __init__(self, name: str) -> None:
        super().__init__(Numbers(), batch_size=4, collate_fn=self.collated)
        self.name = name

    def collated(self, samples: list[Any]) -> Any:
        return {"x": default_collate(samples)}


def test_a_loader_of_a_class_of_its_own_stays_one_and_is_left_alone() -> None:
    plain = Named("train")
    before = dict(plain.__dict__)
    other = rebuilt(plain, Settings(2, 2))
    assert type(other) is Named
    assert other.name == "train"
    assert same(epochs(plain), epochs(other))
    assert plain.__dict__ == before
