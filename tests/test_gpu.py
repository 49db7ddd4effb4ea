"""Test plans on a CUDA device; skipped without one. tests/device has more GPU tests."""

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )  # fmt: skip


def train(model: nn.Module, optimizer, context, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(16, 3, 8, 8, generator=generator).to(context.device)
    y = torch.randint(10, (16,), generator=generator).to(context.device)
    for _ in range(steps):
        with context.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        context.grad_scaler.scale(loss).backward()
        context.grad_scaler.step(optimizer)
        context.grad_scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "value", "is_on"),
    [
        ("tf32", "high", lambda: torch.backends.cuda.matmul.allow_tf32),
        ("cudnn_benchmark", True, lambda: torch.backends.cudnn.benchmark),
    ],
)
def test_a_switch_is_set_and_put_back(name, value, is_on):
    model = nn.Conv2d(1, 1, 3).cuda()
    with apply_speedups(model, SpeedConfig(**{name: value, "compile": False}))[1] as context:
        if not context.plan[name].active:
            pytest.skip(context.plan[name].reason)
        assert is_on()
    assert not is_on()


@pytest.mark.compile
def test_auto_compiles_on_linux_and_trains():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with apply_speedups(model, optimizer=optimizer)[1] as context:
        train(model, optimizer, context)
        assert not context.notes
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_every_attention_kernel_runs_what_the_others_can_take(backend):
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
    mask = torch.zeros(16, 16, device="cuda")
    config = SpeedConfig(sdpa=backend, precision="fp16", compile=False)
    with apply_speedups(model, config)[1] as context, context.autocast():
        assert model(torch.rand(2, 16, 64, device="cuda")).isfinite().all()
        assert model(torch.rand(2, 16, 64, device="cuda"), mask).isfinite().all()
