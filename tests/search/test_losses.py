"""The loss of a step is compared without its scale, whoever scaled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import verify
from speedkit_jupyter.search.verification import watched

SCALE = 2.0**20


class Subclass(torch.amp.GradScaler):
    """One of a framework's own."""


def scaler(kind: type = torch.amp.GradScaler) -> Any:
    return kind("cpu", init_scale=SCALE, growth_interval=2)


WAYS: dict[str, tuple[Callable[[torch.Tensor], None], float]] = {
    "bare": (lambda loss: loss.backward(), 1.0),
    "GradScaler": (lambda loss: scaler().scale(loss).backward(), 1.0),
    "a subclass": (lambda loss: scaler(Subclass).scale(loss).backward(), 1.0),
    "off": (lambda loss: torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward(), 1.0),
    "in a list": (lambda loss: torch.autograd.backward(scaler().scale([loss])), 1.0),
    "divided after": (lambda loss: (scaler().scale(loss) / 4).backward(), 0.25),
    "divided before": (lambda loss: scaler().scale(loss / 4).backward(), 0.25),
    "summed": (lambda loss: sum(scaler().scale(loss) for _ in range(3)).backward(), 3.0),
    "by hand": (lambda loss: (loss * 1024).backward(), 1024.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_whichever_scaler_scaled_it_the_loss_is_seen_without_its_scale(way):
    run, times = WAYS[way]
    torch.manual_seed(0)
    loss = nn.Linear(3, 1)(torch.rand(4, 3)).square().mean()
    with watched() as seen:
        run(loss)
    assert seen.ran_on == pytest.approx([times * loss.item()])


def test_a_checkpoints_backward_inside_the_backward_is_no_loss():
    from torch.utils.checkpoint import checkpoint

    net, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    with watched() as seen:
        checkpoint(net, x, use_reentrant=True).sum().backward()
    assert len(seen.ran_on) == 1


def own_scaler(factor: float, scales: Any) -> Callable[[], None]:
    """A fp32 loop with a scaler that halves and doubles; a fused optimizer meets the factor."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, y = torch.randn(32, 8), torch.randint(4, (32,))

    def step() -> None:
        out = net(x)
        if optimizer.param_groups[0]["fused"]:
            out = out * factor
        loss = nn.functional.cross_entropy(out, y)
        scales.scale(loss).backward()
        scales.step(optimizer)
        scales.update()
        optimizer.zero_grad()

    return step


def test_a_scale_that_moves_hides_no_fault():
    def verified(factor: float) -> Any:
        scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return verify(own_scaler(factor, scales), "fused_optimizer", steps=12)

    honest, wrong = verified(1.0), verified(0.9)
    assert honest.verdict == "same"
    assert wrong.verdict in ("different", "worse")
    assert honest.loss.baseline[0] < 3


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_losses_in_a_step_each_is_judged_by_itself(wrong):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2)]
    both = nn.ModuleList(nets)
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in nets]
    x, y = torch.randn(16, 8), torch.randint(2, (16,))

    def step() -> None:
        for index, (net, optimizer) in enumerate(zip(both, optimizers, strict=True)):
            faulty = optimizer.param_groups[0]["fused"]
            # As where one loss rises by as much as the other falls.
            times = (1.1 if index == wrong else 1 / 1.1) if faulty else 1.0
            (times * nn.functional.cross_entropy(net(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = verify(step, "fused_optimizer", steps=8)
    assert len(found.curves) == 2
    assert found.curves[wrong].agreement == "worse"
    assert found.verdict == "worse"
    assert f"loss {wrong + 1} of 2" in " ".join(str(found).split())
