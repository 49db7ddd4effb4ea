"""float8: linear layers in 8-bit floating point."""

from __future__ import annotations

import pytest
import torch
from compressed import INPUTS, is_near_on_a_gpu, network, on, real
from torch import nn

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.target import Target

pytestmark = pytest.mark.usefixtures("made_time")


@real
def test_float8_trains_as_torchao_does_and_everything_comes_back(monkeypatch):
    import torchao.float8 as own

    config = own.Float8LinearConfig  # whose emulation needs no units
    monkeypatch.setattr(own, "Float8LinearConfig", lambda **more: config(emulate=True, **more))
    model, expected = network().train(), network().train()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected))
    modules, keys = [*model.modules()], list(model.state_dict())
    entry, target = named("float8"), Target(model, [optimizer])
    own.convert_to_float8_training(
        expected,
        config=own.Float8LinearConfig(pad_inner_dim=True),
        module_filter_fn=lambda m, _: type(m) is nn.Linear and m.out_features % 16 == 0,
    )
    with entry.applied(on("float8"), target):
        assert entry.observe(target) == {"model.float8": "2 of 3 linear layers"}
        assert list(model.state_dict()) == keys
        for one, its in ((model, optimizer), (expected, other)):
            one(INPUTS).pow(2).mean().backward()
            its.step()
        model.eval()
    assert [*model.modules()] == modules
    assert not any(module.training for module in modules)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@real
def test_on_a_gpu_it_is_near_the_model_and_comes_back():
    is_near_on_a_gpu("float8", 8, 9)
