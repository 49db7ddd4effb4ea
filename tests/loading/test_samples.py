"""Whether samples are the same."""

from __future__ import annotations

import random
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from speedkit_jupyter import batch_sizes, tune_loader
from speedkit_jupyter.loading.samples import look_at, same
from speedkit_jupyter.support.exceptions import StepError

NAN = float("nan")


@dataclass
class Batch:
    x: object
    name: str = ""


class Words(dict):
    """As tokenizers give them."""


PAIRS = {
    "tensors": (torch.tensor([1.0]), torch.tensor([2.0])),
    "beside no numbers": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])),
    "dtypes": (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    "arrays": (np.array([1.0]), np.array([2.0])),
    "lists": ([1, torch.ones(2)], [1, torch.zeros(2)]),
    "dataclasses": (Batch(torch.ones(2)), Batch(torch.zeros(2))),
    "dictionaries of their own": (Words(x=torch.ones(2)), Words(x=torch.zeros(2))),
    "mappings": (UserDict(x=torch.ones(2)), UserDict(x=torch.zeros(2))),
    "texts": ("a", "b"),
    "kinds": (1, "1"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_is_not_the_same_and_a_copy_of_it_is(name):
    import copy

    one, other = PAIRS[name]
    assert not same(one, other)
    assert not same(other, one)
    assert same(one, copy.deepcopy(one))


class Fresh(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index) + self.draw(self)])


DRAWS = {
    "a generator that is made anew": lambda one: np.random.default_rng().random(),
    "torch's": lambda one: torch.rand(()).item(),
    "Python's": lambda one: random.random(),
    "its own": lambda one: one.own.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_samples_that_are_drawn_at_random_are_told(name):
    dataset = Fresh(DRAWS[name])
    dataset.own = np.random.default_rng(0)
    loader = DataLoader(dataset, batch_size=4)
    assert look_at(loader).is_random


EMPTY = {
    "an empty data set": lambda: DataLoader(TensorDataset(torch.ones(0, 2))),
    "drop_last": lambda: DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=4, drop_last=True),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("call", [
    lambda loader: tune_loader(loader, budget_s=1),
    lambda loader: batch_sizes(lambda x: None, loader=loader, budget_s=1),
], ids=["tune_loader", "batch_sizes"])  # fmt: skip
def test_a_loader_without_batches_gets_one_line(call, name):
    with pytest.raises(StepError, match="gives no batch"):
        call(EMPTY[name]())
