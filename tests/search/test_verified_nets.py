"""Verification on small nets of some kinds: faults that are planted, and plans that only round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import verify

NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 4),
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)),
    "dropout": lambda: nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 4)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)
    ),
}


def training(
    make: Callable[[], nn.Module],
    fault: str = "",
    lr: float = 1e-3,
    decay: float = 0.01,
    dtype: torch.dtype = torch.float32,
    warm_up: bool = False,
) -> Callable[[], torch.Tensor]:
    """A step; the fault shows only where the optimizer is fused."""
    torch.manual_seed(0)
    net = make().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=decay)
    x, y = torch.randn(64, 32, dtype=dtype), torch.randint(4, (64,))
    steps = (lambda n: (n + 1) / 10000) if warm_up else (lambda n: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, steps)

    def step() -> torch.Tensor:
        group: dict[str, Any] = optimizer.param_groups[0]
        planned = bool(group["fused"])
        out = net(x)
        out = out * 0.9 if planned and fault == "logits" else out
        loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        kept = dict(group)
        if planned and fault == "lr":
            group["lr"] = 3 * group["lr"]
        if planned and fault == "decay":
            group["weight_decay"] = 0.0
        optimizer.step()
        group.update(lr=kept["lr"], weight_decay=kept["weight_decay"])
        schedule.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.sampled(6)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("fault", "steps"), [("lr", 12), ("logits", 40), ("decay", 60)])
def test_a_planted_fault_is_another_curve(net, fault, steps):
    step = training(NETS[net], fault, lr=3e-3, decay=2.0 if fault == "decay" else 0.01)
    assert verify(step, "fused_optimizer", steps=steps).verdict in ("different", "worse")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("way", "plan"),
    [
        ("warm-up", "bf16"),
        ("warm-up", "fused_optimizer"),
        ("usual", "bf16"),
        ("usual", "fused_optimizer"),
        ("weights in bf16", "fused_optimizer"),
    ],
)
def test_a_plan_that_only_rounds_is_the_baselines_curve(net, way, plan):
    dtype = torch.bfloat16 if way == "weights in bf16" else torch.float32
    step = training(NETS[net], dtype=dtype, warm_up=way == "warm-up")
    found = verify(step, plan, steps=8)
    assert found.verdict == "same", str(found)


def test_a_curve_that_may_be_anothers_is_held_against_several_baselines():
    certain = verify(training(NETS["linear"], "lr", lr=3e-2), "fused_optimizer", steps=6)
    assert len(certain.loss.others) == 1
    unclear = verify(training(NETS["mlp"], "logits"), "fused_optimizer", steps=3)
    assert unclear.verdict in ("different", "worse")
    assert len(unclear.loss.others) == 4
    assert "the farthest of 4" in " ".join(str(unclear).split())
