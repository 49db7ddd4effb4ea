"""Provide classes, functions and names for the steps that test_rules.py gives as text."""

import copy
import gc
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 4))


class OwnNumbers(Squares):
    """Dataset with its own random generator. Its copies in workers would draw the same numbers."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), self.numbers.random())


class Table(nn.Module):
    def __init__(self, rows: int = 20_000, width: int = 32, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width, **options), nn.Linear(width, 1)

    def forward(self, rows: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return self.head(self.table(rows))


def words(length: int, width: int = 32) -> torch.Tensor:
    """Return four rows of `length` words, padded with zeros to `width`."""
    batch = torch.zeros(4, width, dtype=torch.long)
    batch[:, :length] = 7
    return batch


def namespace() -> dict[str, Any]:
    """Return the names that a step may use, with new objects for `model`, `opt` and `x`."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        **globals(),
        "F": functional,
        "model": model,
        "opt": opt,
        "x": torch.ones(8, 4),
        "__name__": "steps_of_a_test",
        "modules_in_use": (copy, gc, math, warnings, DataLoader, TensorDataset),
    }
