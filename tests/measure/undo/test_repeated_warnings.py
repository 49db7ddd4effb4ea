"""However often a measured step runs, its warnings show as often as in one plain run."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from speedkit_jupyter import batch_sizes, benchmark, tune_loader

NET = nn.Linear(4, 2)


class Warns(Dataset[Any]):
    """Warns at each sample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        warnings.warn("a broken picture", stacklevel=1)
        return torch.full((4,), float(index))


def step(x: torch.Tensor) -> None:
    warnings.warn("of the step", stacklevel=1)
    NET(x).sum().backward()


def loader() -> DataLoader[Any]:
    many = (os.cpu_count() or 1) + 1  # torch warns of more workers than cores, at each epoch
    return DataLoader(Warns(), batch_size=8, num_workers=many)


MEASURES: dict[str, Callable[[], object]] = {
    "a loader": lambda: tune_loader(loader(), step, budget_s=1),
    "batch sizes": lambda: batch_sizes(step, torch.ones(8, 4), sizes=(4, 8), budget_s=0.5),
    "a comparison": lambda: benchmark(lambda: step(torch.ones(2, 4)), budget_s=0.5),
}


@pytest.mark.real_time
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MEASURES)
def test_a_warning_shows_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *more: shown.append(str(text)))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        MEASURES[name]()
    mine = [text for text in shown if "broken" in text or "of the step" in text]
    assert sorted(set(mine)) == sorted(mine)
    assert "of the step" in mine
    assert len([text for text in shown if "worker processes" in text]) <= 2  # made, and measured


@pytest.mark.real_time
def test_how_warnings_are_shown_is_put_back() -> None:
    logging.captureWarnings(False)
    before = warnings.showwarning
    batch_sizes(lambda x: (NET(x), logging.captureWarnings(True)), torch.ones(4, 4), sizes=(4, 8))
    assert warnings.showwarning is before
    logging.captureWarnings(False)
