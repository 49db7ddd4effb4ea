"""float8 and int4: linear layers in 8-bit floating point, and with weights of 4 bits."""

from __future__ import annotations

import pytest
import torch
from compressed import INPUTS, is_near_on_a_gpu, network, on, real, real_of_any_version
from torch import nn

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.target import Target

pytestmark = pytest.mark.usefixtures("made_time")


@real_of_any_version
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


@real
def test_rows_that_are_no_whole_groups_multiply_as_before():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    entry = named("int4")
    with entry.applied(on("int4"), Target(model)):
        assert entry.observe(Target(model)) == {"model.int4": "0 of 2 linear layers"}
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.gpu
@real
@pytest.mark.parametrize(("name", "capability"), [("float8", (8, 9)), ("int4", (8, 0))])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(name, capability):
    is_near_on_a_gpu(name, *capability)
