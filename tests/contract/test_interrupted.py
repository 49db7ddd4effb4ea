"""docs/contract.md: all is put back after an error in the step and after Ctrl-C, too."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark

pytestmark = pytest.mark.usefixtures("made_time")


class Training:
    """A training step that fails at call `at`, with everything that steps change."""

    def __init__(self, fail: Callable[[], object], at: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.x, self.log, self.array = torch.randn(2, 1, 6, 6), [0], np.zeros(2)
        self.at, self.fail = at, fail
        self.calls: SimpleQueue[int] = SimpleQueue()  # counts on: no measurement puts it back
        self.step()

    def step(self) -> None:
        """One optimizer step; the one numbered `at` fails between backward and optimizer."""
        self.log.append(random.random())
        self.array += 1
        self.model(self.x).pow(2).mean().backward()
        self.calls.put(0)
        if self.calls.qsize() == self.at + 1:
            self.fail()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Any:
        """Return what must be the same before and after, to the last bit."""
        state = self.optimizer.state_dict()["state"]
        moments = {key: {name: v.tolist() for name, v in one.items()} for key, one in state.items()}
        return (
            {name: (v.tolist(), v.stride()) for name, v in self.model.state_dict().items()},
            [parameter.grad for parameter in self.model.parameters()],
            moments,
            self.optimizer.param_groups[0]["lr"],
            [*self.log],
            self.array.tolist(),
            random.getstate(),
            torch.get_rng_state().tolist(),
            [module.training for module in self.model.modules()],
        )


def boom() -> None:
    raise ValueError("boom")


def ctrl_c() -> None:
    """A real signal, as Jupyter sends it."""
    signal.raise_signal(signal.SIGINT)


VARIANTS = ["baseline", "bf16", "channels_last+fused_optimizer"]


@pytest.mark.parametrize("at", [1, 3, 6, 11, 20])
@pytest.mark.parametrize("fail", [boom, ctrl_c])
def test_an_error_and_ctrl_c_leave_everything_as_before(fail: Any, at: int) -> None:
    training = Training(fail, at)
    before = training.state()
    # The first calls are the user's own step: its error is raised. A variant's is in the result.
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        benchmark(training.step, VARIANTS, budget_s=2)
    assert training.calls.qsize() > at
    assert training.state() == before
