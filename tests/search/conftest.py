"""Provide steps with made-up speeds on the tests' own clock, so searches see no noise."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_time import MadeTime, installed
from torch import nn
from training import is_lowered

Parts = tuple[nn.Module, Any, Callable[[], None]]


@pytest.fixture
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """Install the simulated clock, on which a reading takes 10 µs."""
    return installed(request, monkeypatch, tick_s=1e-5)


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch: pytest.MonkeyPatch, few_candidates: None) -> None:
    """Hide an IPython shell left by other tests, so that results are those of a plain program."""
    monkeypatch.setattr("speedkit_jupyter.search.outcome.notebook", lambda: None)


@pytest.fixture
def work(made_time: MadeTime) -> Callable[..., Parts]:
    """Return `work(seconds)`, which makes a network, an optimizer, and a step of `seconds(on)`.

    `on.fused`, `on.last` (channels_last) and `on.bf16` tell which changes are in force. With
    `linear` features, the network is one layer, and a search tries one cheap change, not two.
    """

    def make(seconds, linear=0, batch=(2, 1, 8, 8), loss=lambda out, on: out.sum()) -> Parts:
        torch.manual_seed(0)
        network: Any = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        if linear:
            network, batch = nn.Linear(linear, 2), (batch[0], linear)
        optimizer, x = torch.optim.AdamW(network.parameters()), torch.rand(*batch)

        def step() -> None:
            on = SimpleNamespace(
                fused=bool(optimizer.param_groups[0]["fused"]),
                last=not linear and network[0].weight.stride()[1] == 1,
                bf16=is_lowered(network),
            )
            made_time.sleep(seconds(on))
            loss(network(x), on).backward()
            optimizer.step()
            optimizer.zero_grad()

        return network, optimizer, step

    return make
