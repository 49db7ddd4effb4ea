"""A step that computes something else at times accuses nobody."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark


@pytest.mark.parametrize("period_s", [0.05, 0.3])
def test_a_whole_number_of_the_clock_is_no_fault_of_a_plan(machine, period_s):
    machine("cpu")
    torch.manual_seed(0)
    model, log = nn.Linear(16, 16), {}
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 16)

    def step() -> torch.Tensor:
        log["phase"] = int(time.time() / period_s)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = benchmark(step, "baseline,fused_optimizer,channels_last", budget_s=1)
    assert [found.verdict(record) for record in found.records if record.accuracy].count(
        "wrong"
    ) == 0


def test_what_is_wrong_each_time_is_still_wrong(machine):
    machine("cpu")
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 16)

    def step() -> torch.Tensor:
        loss = model(x).square().mean() * (2 if optimizer.param_groups[0]["fused"] else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = benchmark(step, "baseline,fused_optimizer", budget_s=1)
    assert found.verdict(found.records[1]) == "wrong"
