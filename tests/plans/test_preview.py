"""The plan of a config, without applying it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.plans.applying import preview
from speedkit_jupyter.plans.context import observed

CONFIGS = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "threads": 1},
    {"sdpa": "math", "channels_last": False},
    {"fused_optimizer": False, "tf32": "highest"},
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3))


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters())


def everything(model, optimizer):
    return observed(Target(model, [optimizer])), [p.stride() for p in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", CONFIGS, ids=str)
@pytest.mark.parametrize("then", CONFIGS, ids=str)
def test_a_preview_is_the_plan_that_apply_makes(model, optimizer, first, then):
    _, context = apply_speedups(model, SpeedConfig(**first), optimizer=optimizer)
    before = everything(model, optimizer)
    seen = preview(model, SpeedConfig(**then), [optimizer])
    assert everything(model, optimizer) == before  # it touches nothing
    _, context = apply_speedups(model, SpeedConfig(**then), optimizer=optimizer)
    now = preview(model, SpeedConfig(**then), [optimizer])
    assert seen.plan.to_dict() == context.plan.to_dict()
    assert not now.pending
    context.restore()


def test_an_optimizer_made_after_applying_is_planned_for(model):
    context = apply_speedups(model)[1]
    optimizer = torch.optim.AdamW(model.parameters())
    found = preview(model, SpeedConfig(), [optimizer])
    assert found.plan["fused_optimizer"].active
    assert not found.pending  # it gets its fused kernel by itself
    context.restore()


def test_each_word_has_the_decision_that_asking_for_it_would_give(model, optimizer):
    found = preview(model, SpeedConfig(precision="fp16"), [optimizer])
    assert set(found.words["precision"]) == {"auto", "fp32", "bf16", "fp16"}
    assert found.words["sdpa"]["flash"].declined
    assert not found.words["sdpa"]["math"].declined
    assert found.words["grad_scaler"]["auto"].value is True  # since fp16 is asked for


def test_a_wish_keeps_the_others_and_no_variable_overrides_it(monkeypatch):
    monkeypatch.setenv("SPEEDKIT_PRECISION", "fp32")
    config = SpeedConfig(compile={"enabled": True, "mode": "max-autotune"}).changed("tf32", "high")
    assert config.compile.mode == "max-autotune"
    assert config.precision == "fp32"
    config = config.changed("precision", "bf16").changed("compile.enabled", False)
    assert (config.precision, config.tf32, config.compile.enabled) == ("bf16", "high", False)
    assert config.word("compile.enabled") == "false"
    config = config.changed("threads", 2)
    assert config.word("threads") == "2"
