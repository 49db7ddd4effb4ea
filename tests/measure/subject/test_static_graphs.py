"""DistributedDataParallel(static_graph=True): its reducer can't begin anew after its first step."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

from speedkit_jupyter import StepError, benchmark, verify

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")


@pytest.fixture
def parallel():
    """A training step of one process."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        model = nn.parallel.DistributedDataParallel(net, static_graph=True)
        optimizer, x = torch.optim.SGD(model.parameters(), 0.01), torch.randn(16, 8)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step
    finally:
        distributed.destroy_process_group()


def test_before_its_first_step_it_is_refused_with_what_to_do_and_trains_on(parallel):
    step = parallel
    for measure in (lambda: benchmark(step, budget_s=1), lambda: verify(step, "bf16", steps=3)):
        with pytest.raises(StepError, match="run one step before"):
            measure()
    for _ in range(3):
        step()


def test_after_its_first_step_it_is_measured_and_trains_on(parallel):
    step = parallel
    step()
    found = benchmark(step, "baseline,bf16,fused_optimizer", budget_s=2)
    assert not any(record.failure for record in found.records)
    step()
