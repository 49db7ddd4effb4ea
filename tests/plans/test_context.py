"""Check apply_speedups(), its context, and previews, which plan a config without applying it."""

import pytest
import torch
from torch import nn
from training import surface

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups, autocast_context
from speedkit_jupyter.plans.applying import prepare, preview
from speedkit_jupyter.plans.context import hidden


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 3))


def test_the_inner_with_wins_and_the_outer_returns(model):
    with apply_speedups(model, SpeedConfig(sdpa="math"))[1] as outer:
        with apply_speedups(model, SpeedConfig(threads=1))[1] as inner:
            assert inner.active
            assert torch.backends.cuda.flash_sdp_enabled()
        assert outer.active
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_changes_are_what_differs_from_before(model):
    _, context = apply_speedups(model, SpeedConfig(sdpa="math", channels_last=True))
    changed = {change.name: change for change in context.changes()}
    assert changed["sdp.flash"][1:] == (True, False)
    assert changed["model.channels_last"].after == "1 of 1 convolutions"
    context.restore()
    assert context.changes() == ()


def test_restoring_twice_is_harmless_and_entering_afterwards_is_an_error(model):
    _, context = apply_speedups(model, SpeedConfig(threads=1))
    context.restore()
    context.restore()
    with pytest.raises(SpeedKitError, match="was restored"):
        context.__enter__()
    with context.autocast(), context.sdpa(), autocast_context(context):
        assert not torch.is_autocast_enabled("cpu")


def test_a_prepared_context_changes_nothing_until_it_is_in_force(model):
    with apply_speedups(model, SpeedConfig(sdpa="math"))[1], hidden(model):
        assert torch.backends.cuda.flash_sdp_enabled()
    context = prepare(model, SpeedConfig(sdpa="math"))
    assert torch.backends.cuda.flash_sdp_enabled()
    with context.in_force():
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not any(decision.active for decision in prepare(model, None).plan)


CONFIGS = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "threads": 1},
    {"sdpa": "math", "channels_last": False},
    {"fused_optimizer": False, "tf32": "highest"},
]


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", CONFIGS, ids=str)
@pytest.mark.parametrize("then", CONFIGS, ids=str)
def test_a_preview_is_the_plan_that_apply_makes(model, optimizer, first, then):
    _, context = apply_speedups(model, SpeedConfig(**first), optimizer=optimizer)
    before = surface(model, optimizer)
    seen = preview(model, SpeedConfig(**then), [optimizer])
    assert surface(model, optimizer) == before  # a preview changes nothing
    _, context = apply_speedups(model, SpeedConfig(**then), optimizer=optimizer)
    now = preview(model, SpeedConfig(**then), [optimizer])
    assert seen.plan.to_dict() == context.plan.to_dict()
    assert not now.pending
    context.restore()


def test_an_optimizer_made_after_applying_is_planned_for(model):
    context = apply_speedups(model)[1]
    found = preview(model, SpeedConfig(), [torch.optim.AdamW(model.parameters())])
    assert found.plan["fused_optimizer"].active
    assert not found.pending  # the plan in force fuses it
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
    assert config.changed("threads", 2).word("threads") == "2"
