"""A framework may hand every optimizer step a closure, also one that does nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark


@pytest.mark.slow
def test_gradients_are_compared_before_a_step_whose_closure_does_nothing():
    """Else whatever a loop inside the step does later is compared: training, not rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer, x = torch.optim.Adam(model.parameters(), 0.3), torch.rand(16, 8)

    def step():
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step(lambda: None)
        return loss

    found = benchmark(step, "baseline,bf16", budget_s=0.1)
    assert found.records[1].failure is None
    assert found.records[1].accuracy.verdict == "rounding", found.records[1].accuracy
