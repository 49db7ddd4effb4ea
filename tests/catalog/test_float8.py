"""float8: linear layers that train in 8-bit floating point, by torchao."""

from __future__ import annotations

import copy

import pytest
import torch
from compressed import INPUTS, bits, needs_capability, network, real
from torch import nn

from speedkit_jupyter.catalog import float8, named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target

ON = Decision("float8", True, "as asked", active=True)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's own emulation, in the place of units that this machine has not."""
    import torchao.float8 as own

    real_config = own.Float8LinearConfig
    monkeypatch.setattr(own, "Float8LinearConfig", lambda **more: real_config(emulate=True, **more))


@real
def test_it_trains_as_torchao_does_and_everything_comes_back(emulated):
    model, expected = network().train(), network().train()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected))
    modules, keys = [*model.modules()], list(model.state_dict())
    entry, target = named("float8"), Target(model, [optimizer])
    float8.torchao("float8").convert_to_float8_training(
        expected,
        config=float8.torchao("float8").Float8LinearConfig(pad_inner_dim=True),
        module_filter_fn=lambda m, _: type(m) is nn.Linear and m.out_features % 16 == 0,
    )
    with entry.applied(ON, target):
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
    needs_capability(8, 9)
    model, x = network().cuda().bfloat16(), INPUTS.cuda().bfloat16()
    plain, before = model(x), copy.deepcopy(bits(model))
    with named("float8").applied(ON, Target(model)):
        found = model(x)
        found.sum().backward()
    assert not torch.equal(found, plain)
    assert (found - plain).norm() < 0.2 * plain.norm()
    assert bits(model) == before
