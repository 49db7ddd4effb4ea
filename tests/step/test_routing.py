"""Plain steps under a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter import SpeedConfig, StepError
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.step.routing import Router


@pytest.fixture
def parts():
    """A model, its optimizer and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, torch.rand(8, 8), torch.randint(4, (8,))


def run(parts, config: SpeedConfig, step, optimizer=None) -> None:
    """The step under a plan, three times."""
    optimizer = optimizer or parts[1]
    context = prepare(parts[0], config, [optimizer])
    router = Router([context], [optimizer])
    with context.in_force(), router.installed():
        for _ in range(3):
            router.run(step)


def plain(**values) -> SpeedConfig:
    return SpeedConfig(fused_optimizer=False, **values)


def test_autocast_is_on_in_the_forward_pass_and_off_in_backward_and_step(parts):
    model, optimizer, x, y = parts
    seen = {}

    def note(part):
        seen[part] = torch.is_autocast_enabled("cpu")

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            note("forward")
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            note("backward")
            return gradient

    optimizer.register_step_pre_hook(lambda *_: note("step"))
    run(parts, plain(precision="bf16"), lambda: (
        nn.functional.cross_entropy(Spy.apply(model(x)), y).backward(), optimizer.step()
    ))  # fmt: skip
    assert seen == {"forward": True, "backward": False, "step": False}
    assert not torch.is_autocast_enabled("cpu")


def test_every_patch_is_taken_back_after_an_exception(parts):
    model, optimizer, x, _ = parts

    def patched():
        clip_grad = torch.nn.utils.clip_grad
        group = clip_grad._group_tensors_by_device_and_dtype
        return torch.autograd.backward, torch.autograd.grad, group

    before = patched()

    def step():
        model(x).sum().backward()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        run(parts, plain(precision="fp16"), step)
    assert patched() == before
    assert "step" not in optimizer.__dict__


@pytest.mark.parametrize("clip", [False, True])
def test_a_plain_fp16_step_is_the_documented_loop_with_the_scaler(parts, clip):
    model, optimizer, x, y = parts
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()

    run(parts, plain(precision="fp16"), step)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(twin(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(other)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        scaler.step(other)
        scaler.update()
        other.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_closure_is_declined_where_its_loss_must_be_scaled(parts):
    model, _, x, _ = parts
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(StepError, match="closure"):
        run(parts, plain(precision="fp16"), lambda: lbfgs.step(lambda: model(x).sum()), lbfgs)


@pytest.mark.parametrize("named", [False, True])
def test_autocast_is_on_in_a_closure_and_off_in_the_step_around_it(parts, named):
    model, optimizer, x, y = parts
    inside, around = [], []
    optimizer.register_step_post_hook(lambda *_: around.append(torch.is_autocast_enabled("cpu")))

    def closure():
        output = model(x)
        inside.append((output.dtype, torch.is_autocast_enabled("cpu")))
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        return loss

    def step():
        optimizer.step(closure=closure) if named else optimizer.step(closure)

    run(parts, plain(precision="bf16"), step)
    assert inside == [(torch.bfloat16, True)] * 3
    assert around == [False] * 3
    assert not torch.is_autocast_enabled("cpu")


def test_a_plan_of_full_precision_patches_nothing(parts):
    seen = []
    before = torch.autograd.backward
    config = SpeedConfig(precision="fp32")
    run(parts, config, lambda: seen.append(torch.autograd.backward is before))
    assert seen == [True] * 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_may_run_backward_inside_backward(parts, precision, reentrant):
    model, optimizer, x, y = parts
    x.requires_grad_()

    def step():
        output = checkpoint(model, x, use_reentrant=reentrant)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()

    before = model[0].weight.clone()
    run(parts, plain(precision=precision), step)
    assert model[0].weight.isfinite().all()
    assert not torch.equal(model[0].weight, before)
