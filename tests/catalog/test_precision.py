"""precision: autocast around the forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, autocast_context


def applied(model: nn.Module, **values):
    return apply_speedups(model, SpeedConfig(**values))[1]


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_runs_in_the_dtype_inside_autocast_only(word, dtype):
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    with applied(model, precision=word) as context:
        assert model(x).dtype is torch.float32
        with context.autocast():
            assert model(x).dtype is dtype
        with autocast_context(context):
            assert model(x).dtype is dtype
    with context.autocast():
        assert model(x).dtype is torch.float32


@pytest.mark.parametrize(
    ("asked", "dtype"), [({"precision": "fp32"}, torch.float32), ({"threads": 1}, torch.bfloat16)]
)
def test_fp32_by_request_switches_an_outer_autocast_off_and_auto_does_not(machine, asked, dtype):
    machine("cpu")
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    with applied(model, **asked) as context, torch.autocast("cpu"), context.autocast():
        assert model(x).dtype is dtype


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_an_lstm_computes_on_every_cpu(word):
    model = nn.LSTM(4, 4)
    with applied(model, precision=word) as context, context.autocast():
        output, _ = model(torch.rand(2, 3, 4))
        output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_fp32_is_granted_to_a_model_of_any_dtype():
    model = nn.Linear(4, 4, dtype=torch.float64)
    with applied(model, precision="fp32") as context:
        assert not context.plan["precision"].declined
        with torch.autocast("cpu"), context.autocast():
            assert not torch.is_autocast_enabled("cpu")
