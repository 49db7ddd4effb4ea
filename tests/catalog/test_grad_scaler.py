"""grad_scaler: on for fp16, a pass-through elsewhere, and missed when left out."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups


@pytest.fixture
def parts():
    """Model, optimizer, batch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.rand(2, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_loop_trains_at_every_precision(parts, precision):
    model, optimizer, x = parts
    before = model.weight.clone()
    with apply_speedups(model, SpeedConfig(precision=precision), optimizer=optimizer)[1] as ctx:
        assert ctx.grad_scaler.is_enabled() == (precision == "fp16")
        for _ in range(3):
            with ctx.autocast():
                loss = model(x).float().pow(2).mean()
            ctx.grad_scaler.scale(loss).backward()
            ctx.grad_scaler.step(optimizer)
            ctx.grad_scaler.update()
            optimizer.zero_grad()
    assert model.weight.isfinite().all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("own", [False, True])
def test_a_scaler_is_recognized_also_the_users_own(parts, own):
    model, optimizer, x = parts
    with apply_speedups(model, SpeedConfig(precision="fp16"), optimizer=optimizer)[1] as ctx:
        scaler = torch.amp.GradScaler("cpu") if own else ctx.grad_scaler
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ctx.autocast():
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)


def test_another_models_optimizer_is_not_accused(parts):
    model, _, x = parts
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with apply_speedups(model, SpeedConfig(precision="fp16"))[1] as ctx, warnings.catch_warnings():
        warnings.simplefilter("error")
        with ctx.autocast():
            model(x)
        optimizer.step()


def test_it_can_be_refused_for_fp16(parts):
    config = SpeedConfig(precision="fp16", grad_scaler=False)
    with apply_speedups(parts[0], config)[1] as ctx:
        assert not ctx.grad_scaler.is_enabled()
        assert "underflow" in ctx.plan["grad_scaler"].reason
