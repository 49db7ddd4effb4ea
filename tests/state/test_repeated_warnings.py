"""The warnings of a measured step show as often as in one plain run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from speedkit_jupyter import benchmark, tune_loader

pytestmark = pytest.mark.usefixtures("made_time")

NET = nn.Linear(4, 2)


class Warns(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        warnings.warn("a broken picture", stacklevel=1)
        return torch.full((4,), float(index))


def step(x: torch.Tensor) -> None:
    warnings.warn("of the step", stacklevel=1)
    NET(x).sum().backward()


@pytest.mark.real_time
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "measure",
    [
        lambda: tune_loader(DataLoader(Warns(), batch_size=8), step, budget_s=1),
        lambda: benchmark(lambda: step(torch.ones(2, 4)), budget_s=0.5),
    ],
)
def test_a_warning_shows_once(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *more: shown.append(str(text)))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        measure()
    mine = [text for text in shown if "broken" in text or "of the step" in text]
    assert sorted(set(mine)) == sorted(mine)
    assert "of the step" in mine
