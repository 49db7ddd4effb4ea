"""int4: linear layers with weights of 4 bits, by torchao, where nothing is trained."""

from __future__ import annotations

import pytest
import torch
from compressed import needs_capability, real, with_plan
from torch import nn

from speedkit_jupyter import SpeedConfig
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target


@real
def test_rows_that_are_no_whole_groups_multiply_as_before():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    entry, on = named("int4"), Decision("int4", True, "as asked", active=True)
    with entry.applied(on, Target(model)):
        assert entry.observe(Target(model)) == {"model.int4": "0 of 2 linear layers"}
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.gpu
@real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(dtype):
    needs_capability(8, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 60)).cuda().to(dtype)
    inputs = torch.randn(3, 256, device="cuda", dtype=dtype)
    plain, found = with_plan(model, inputs, SpeedConfig(int4=True), "2 of 2 linear layers")
    assert not torch.equal(found, plain)
    assert (found - plain).norm() < 0.2 * plain.norm()
