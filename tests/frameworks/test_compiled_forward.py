"""A model whose own forward pass enters `ctx.autocast()`, compiled by the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark

pytestmark = pytest.mark.usefixtures("made_time")


class Autocasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.contexts = nn.Linear(8, 8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.contexts[0].autocast():
            return self.layer(x)


@pytest.mark.slow
def test_dynamo_follows_the_plan_that_is_in_force():
    torch.manual_seed(0)
    model, x = Autocasts(), torch.randn(2, 8)
    compiled, plain = torch.compile(model, backend="eager"), model.layer(x)
    _, context = apply_speedups(model, SpeedConfig(precision="bf16").alone())
    model.contexts.append(context)
    try:
        assert not torch.equal(compiled(x), plain)
        context.restore()
        assert torch.equal(compiled(x), plain)

        def step() -> None:
            compiled(x).float().sum().backward()

        found = benchmark(step, "baseline,bf16", model=model, budget_s=0.5)
        baseline, lowered = (one.accuracy for one in found.records)
        assert (baseline.verdict, lowered.verdict) == ("exact", "rounding")
        assert lowered.output_error > 1e-4 > baseline.output_error
    finally:
        context.restore()
        torch._dynamo.reset()
