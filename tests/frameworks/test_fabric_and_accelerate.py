"""Plans and measurements of models and optimizers that Accelerate or Fabric prepared."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark, code, tune, verify

pytestmark = pytest.mark.slow

ALL = SpeedConfig.from_dict({"precision": "bf16", "channels_last": True, "fused_optimizer": True})


@dataclass
class Work:
    """The user's objects as the framework prepared them, and a step that uses them."""

    framework: Any
    model: Any
    optimizer: Any
    scheduler: Any
    inner: torch.optim.Optimizer
    step: Any

    def all(self):
        return self.framework, self.model, self.optimizer, self.scheduler, self.inner


def stepping(model, batch, optimizer, scheduler, backward, clip):
    def step():
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        backward(loss)
        clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    return step


def with_accelerate(net, batch, **more) -> Work:
    from accelerate import Accelerator

    ours = Accelerator(cpu=True, **more)
    inner = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 20)
    model, optimizer, scheduler = ours.prepare(net, inner, scheduler)

    clip = partial(ours.clip_grad_norm_, [*model.parameters()], 1.0)
    plain = stepping(model, batch, optimizer, scheduler, ours.backward, clip)

    def step():
        with ours.accumulate(model):
            return plain()

    return Work(ours, model, optimizer, scheduler, inner, step)


def with_fabric(net, batch, **more) -> Work:
    from lightning.fabric import Fabric

    ours = Fabric(accelerator="cpu", devices=1, **more)
    inner = torch.optim.AdamW(net.parameters(), 1e-2)
    model, optimizer = ours.setup(net, inner)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    clip = partial(ours.clip_gradients, model, optimizer, max_norm=1.0)
    step = stepping(model, batch, optimizer, scheduler, ours.backward, clip)
    return Work(ours, model, optimizer, scheduler, inner, step)


KINDS = {
    "accelerate": (with_accelerate, {}),
    "accelerate, accumulating": (with_accelerate, {"gradient_accumulation_steps": 2}),
    "accelerate in bf16": (with_accelerate, {"mixed_precision": "bf16"}),
    "fabric": (with_fabric, {}),
    "fabric in bf16": (with_fabric, {"precision": "bf16-mixed"}),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def work(request, net, batch):
    make, more = request.param
    made = make(net, batch, **more)
    made.step()
    return made


def test_a_plan_switches_the_optimizer_and_all_comes_back(work, look):
    before = look(*work.all())
    _, context = apply_speedups(work.model, ALL, optimizer=work.optimizer)
    assert context.plan["fused_optimizer"].active
    assert all(group["fused"] for group in work.inner.param_groups)
    assert {change.name for change in context.changes()} >= {"AdamW.fused", "model.channels_last"}
    assert "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)" in code(context)
    context.restore()
    assert before.changes(look(*work.all())) == []


@pytest.mark.sampled(3)
def test_a_benchmark_varies_the_optimizer_and_puts_all_back(work, look, variants):
    before = look(*work.all())
    found = benchmark(work.step, variants, budget_s=0.3)
    assert before.changes(look(*work.all())) == []
    assert {one.name: one.failure for one in found.records if one.failure} == {}
    assert found.records[2].applied == {"fused_optimizer": True}
    assert [found.verdict(one) for one in found.records].count("wrong") == 0


@pytest.mark.sampled(3)
def test_a_search_and_a_verification_put_all_back(work, look):
    before = look(*work.all())
    tuned = tune(work.step, budget_s=0.5, fresh=True)
    found = verify(work.step, ALL, steps=3)
    assert before.changes(look(*work.all())) == []
    assert not found.failure
    assert any("fused_optimizer" in name for name in [tuned.winner.name, *tuned.rejected])
