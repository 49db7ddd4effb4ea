"""A notebook with a model; the panel's namespace is the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_time import MadeTime
from torch import nn

from speedkit_jupyter.notebook import session
from speedkit_jupyter.notebook.panel import panel


@pytest.fixture
def names() -> Iterator[Any]:
    """The notebook's names, as attributes: model, optimizer, x, y and a train_step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    space = SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        x=torch.rand(8, 1, 8, 8),
        y=torch.randint(10, (8,)),
    )

    def train_step() -> float:
        loss = nn.functional.cross_entropy(space.model(space.x), space.y)
        loss.backward()
        space.optimizer.step()
        space.optimizer.zero_grad()
        return float(loss.item())

    space.train_step = train_step
    del model
    session.begin(vars(space))
    yield space
    session.end()


@pytest.fixture
def every_round_drawn(names: Any, monkeypatch: pytest.MonkeyPatch, made_time: MadeTime) -> None:
    """A measurement that goes on to the end of its budget, and a panel that shows all of it."""
    monkeypatch.setattr(panel, "INTERVAL_S", 0.0)
    step = names.train_step

    def noisy() -> float:
        made_time.sleep(made_time.perf_counter() * 7919 % 0.02)
        return float(step())

    names.train_step = noisy
