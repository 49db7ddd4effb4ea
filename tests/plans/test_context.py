"""apply_speedups and the context that it returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups, autocast_context
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.applying import hidden, prepare


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())


def test_applying_again_plans_from_the_original_and_one_restore_is_enough(model):
    before = flags.snapshot()
    stride = model[0].weight.stride()
    _, first = apply_speedups(model, SpeedConfig(threads=1, sdpa="math"))
    _, second = apply_speedups(model, SpeedConfig(channels_last=True))
    assert not first.active
    assert torch.backends.cuda.flash_sdp_enabled()
    second.restore()
    assert first.restored
    assert flags.diff(before, flags.snapshot()) == ()
    assert model[0].weight.stride() == stride


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
