"""mx: linear layers in microscaling formats, by torchao, where nothing is trained."""

from __future__ import annotations

import pytest
import torch
from compressed import INPUTS, needs_capability, network, real, with_plan

from speedkit_jupyter import SpeedConfig
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target

WORDS = ("mxfp8", "mxfp4")


@real
@pytest.mark.parametrize("word", WORDS)
def test_weights_are_torchaos_and_come_back(word):
    model = network().bfloat16()
    weight, entry, on = model[0].weight, named("mx"), Decision("mx", word, "as asked", active=True)
    with entry.applied(on, Target(model)):
        assert entry.observe(Target(model)) == {"model.mx": "2 of 3 linear layers"}
        assert type(model[0].weight).__name__ == "MXTensor"
        off = model[0].weight.dequantize(torch.float32) - weight.float()
        assert off.norm() < 0.2 * weight.float().norm()
    assert model[0].weight is weight


@pytest.mark.gpu
@real
def test_on_a_gpu_it_is_near_the_model_and_comes_back():
    needs_capability(10, 0)
    model, inputs = network().cuda().bfloat16(), INPUTS.cuda().bfloat16()
    plain, found = with_plan(model, inputs, SpeedConfig(mx=True), "2 of 3 linear layers")
    assert (found - plain).norm() < 0.2 * plain.norm()
