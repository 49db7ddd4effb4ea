"""rewrites: other modules of torch's in the place of a model's own, by request, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, code, plan

pytestmark = pytest.mark.usefixtures("made_time")

KINDS = ("instance_norm", "gelu")
INPUTS = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """What each kind finds something in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True))
        self.act = nn.GELU()
        self.mlp = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.act(self.conv(x)).mean((2, 3)))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def chosen(*kinds: str) -> SpeedConfig:
    """These kinds and no more."""
    return SpeedConfig(rewrites={"enabled": True} | {kind: kind in kinds for kind in KINDS}).alone()


def looks(model: nn.Module) -> list:
    """All that a rewrite may touch, by identity where there is one."""
    return [
        (id(part), sorted(part.__dict__), part.training,
         [(name, id(p)) for name, p in part.named_parameters()])
        for part in model.modules()
    ]  # fmt: skip


def test_rules_leave_it_and_say_that_it_has_to_be_asked_for():
    decision = plan(facts=Facts.read(block()))["rewrites"]
    assert (decision.active, decision.worth_measuring) == (False, None)
    assert "on request only" in decision.reason
    assert "1 GELU -> tanh" in decision.reason


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        torch.jit.script(nn.Sequential(nn.GELU())),
        nn.Sequential(nn.GELU(approximate="tanh")),
        nn.Sequential(nn.InstanceNorm2d(12, affine=True)),
        nn.Sequential(nn.InstanceNorm2d(16)),
        nn.Sequential(nn.InstanceNorm2d(16, affine=True, track_running_stats=True)),
    ],
)
def test_what_there_is_nothing_for_is_declined(model):
    assert plan(SpeedConfig(rewrites=True), facts=Facts.read(model))["rewrites"].declined


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)], ids=str)
def test_modules_are_others_meanwhile_and_the_users_own_afterwards(kinds, ending):
    model = block()
    before, plain = looks(model), model(INPUTS)
    words = {"instance_norm": "GroupNorm(8, 16", "gelu": "GELU(approximate='tanh')"}
    try:
        with apply_speedups(model, chosen(*kinds))[1] as context:
            assert {k for k in KINDS if words[k] in str(model)} == {*kinds}
            assert all(f"model.{kind}" in str(context.changes()) for kind in kinds)
            assert not torch.equal(model(INPUTS), plain)
            if ending:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    assert looks(model) == before
    assert torch.equal(model(INPUTS), plain)


def test_a_model_trains_on_with_the_same_parameters_and_modes():
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.clone() for p in model.parameters()]
    with apply_speedups(model, chosen(*KINDS), optimizer=optimizer)[1]:
        model(INPUTS).sum().backward()
        optimizer.step()
        model.eval()
    assert not any(part.training for part in model.modules())
    assert not any(map(torch.equal, before, model.parameters()))


def test_what_the_user_puts_there_meanwhile_stays():
    model = block()
    own = nn.SiLU()
    with apply_speedups(model, chosen(*KINDS))[1]:
        model.act = own
    assert model.act is own
    assert type(model.conv[1]) is nn.InstanceNorm2d


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)], ids=str)
def test_the_code_does_the_same(kinds):
    model = block()
    found = plan(chosen(*kinds), facts=Facts.read(model))
    names: dict[str, Any] = {"model": copy.deepcopy(model)}
    exec(code(found), names)
    with apply_speedups(model, chosen(*kinds))[1]:
        assert torch.equal(names["model"](INPUTS), model(INPUTS))
