"""Models in torch's wrappers for several processes are put back as bare ones are."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from speedkit_jupyter import StateWarning
from speedkit_jupyter.rounds.from_function import step_of

pytestmark = pytest.mark.usefixtures("made_time", "one_process")


@pytest.mark.parametrize(
    "wrap", [fully_shard, nn.parallel.DistributedDataParallel, nn.DataParallel]
)
def test_a_step_of_a_wrapped_model_is_measured_and_put_back(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    net = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(8, 8)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> str:
        return str([net.state_dict(), optimizer.state_dict(), torch.get_rng_state().tolist()])

    step()
    before = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with step_of(step).guarded() as guard:
            for _ in range(3):
                step()
                guard.state.restore()
    assert state() == before
    assert [str(one.message) for one in caught if one.category is StateWarning] == []
    step()
    assert state() != before
