"""Test `grad_scaler`: a plain loop computes the same as torch's documented loop with a scaler."""

import copy

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups

FP16 = SpeedConfig(precision="fp16").alone()
LOSS = nn.CrossEntropyLoss()


def parts(kind=torch.optim.AdamW, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return net, kind(net.parameters(), 0.01), torch.rand(8, 8), torch.randint(4, (8,))


def documented(net, optimizer, x, y, steps, clip=0.0):
    """Train with the loop from torch's documentation."""
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            output = net(x)
        scaler.scale(LOSS(output.float(), y)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def weights(net):
    return [one.detach().clone() for one in net.parameters()]


def alike(net, other):
    return all(map(torch.equal, weights(net), weights(other)))


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_plain_loop_gives_the_same_weights(kind, clip):
    net, optimizer, x, y = parts(kind)
    twin, other, _, _ = parts(kind)
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        for _ in range(4):
            LOSS(net(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    documented(twin, other, x, y, 4, clip)
    assert alike(net, twin)


def test_gradients_are_unscaled_at_the_step_and_accumulate():
    net, optimizer, x, y = parts(torch.optim.SGD)
    twin, _, _, _ = parts(torch.optim.SGD)
    for _ in range(2):
        LOSS(twin(x), y).backward()
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        for _ in range(2):
            LOSS(net(x), y).backward()
        optimizer.step()
    assert torch.allclose(net[0].weight.grad, twin[0].weight.grad, rtol=0.05, atol=1e-3)


def test_a_step_whose_gradients_overflow_is_skipped_and_the_factor_falls():
    net, optimizer, x, _ = parts()
    before = weights(net)
    with apply_speedups(net, FP16, optimizer=optimizer)[1] as context:
        (net(x).sum() * 1e6).backward()
        optimizer.step()
        assert all(map(torch.equal, weights(net), before))
        optimizer.zero_grad()
        (net(x).mean() * 1e-3).backward()
        assert context.grad_scaler.get_scale() == 2.0**15
        optimizer.step()
        assert not all(map(torch.equal, weights(net), before))


@pytest.mark.parametrize("own", [False, True])
def test_a_loop_that_scales_by_itself_is_left_alone(own):
    net, optimizer, x, y = parts()
    twin, other, _, _ = parts()
    with apply_speedups(net, FP16, optimizer=optimizer)[1] as context:
        scaler = torch.amp.GradScaler("cpu") if own else context.grad_scaler
        for _ in range(3):
            scaler.scale(LOSS(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    documented(twin, other, x, y, 3)
    assert alike(net, twin)


def test_another_model_trains_as_without_the_plan():
    net, optimizer, x, y = parts()
    other, its, _, _ = parts(seed=1)
    twin, twins, _, _ = parts(seed=1)
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        LOSS(net(x), y).backward()
        LOSS(other(x), y).backward()
        its.step()
        optimizer.step()
    LOSS(twin(x), y).backward()
    twins.step()
    assert alike(other, twin)


def test_one_loss_through_a_planned_and_a_plain_model_trains_both():
    net, optimizer, x, y = parts(torch.optim.SGD)
    head = nn.Linear(4, 4)
    its, before = torch.optim.SGD(head.parameters(), 0.01), head.weight.detach().clone()
    twin, twin_head = copy.deepcopy(net), copy.deepcopy(head)
    LOSS(twin_head(twin(x)), y).backward()
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        LOSS(head(net(x)), y).backward()
        optimizer.step()
        its.step()
    step = before - head.weight
    assert torch.allclose(step, 0.01 * twin_head.weight.grad, rtol=0.05, atol=1e-5)


def test_two_models_with_optimizers_that_alternate_train():
    first, one, x, _ = parts()
    second, two, _, _ = parts(seed=1)
    before = weights(first) + weights(second)
    a = apply_speedups(first, FP16, optimizer=one)[1]
    b = apply_speedups(second, FP16, optimizer=two)[1]
    for _ in range(3):
        for net, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    a.restore()
    second(x).square().mean().backward()
    two.step()
    b.restore()
    now = weights(first) + weights(second)
    assert all(one.isfinite().all() for one in now)
    assert not any(map(torch.equal, before, now))
    assert not hasattr(torch.autograd.backward, "stands_in_for")


def test_a_backward_pass_with_a_gradient_of_its_own_is_scaled():
    net, optimizer, x, _ = parts(torch.optim.SGD)
    twin, other, _, _ = parts(torch.optim.SGD)
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        net(x).backward(torch.full((8, 4), 1e-3))
        optimizer.step()
    twin(x).backward(torch.full((8, 4), 1e-3))
    other.step()
    assert torch.allclose(net[0].weight, twin[0].weight, atol=1e-4)


def test_optimizers_with_closures_and_in_hooks_of_gradients_train():
    net, _, x, y = parts()
    solver = torch.optim.LBFGS(net.parameters(), max_iter=3)
    hooked, _, _, _ = parts(seed=1)
    each = {one: torch.optim.SGD([one], 0.01) for one in hooked.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for one in hooked.parameters():
        one.register_post_accumulate_grad_hook(step)
    before = weights(net) + weights(hooked)

    def closure():
        solver.zero_grad()
        loss = LOSS(net(x), y)
        loss.backward()
        return loss

    with apply_speedups(net, FP16, optimizer=solver)[1]:
        solver.step(closure)
    with apply_speedups(hooked, FP16)[1]:
        LOSS(hooked(x), y).backward()
    now = weights(net) + weights(hooked)
    assert all(one.isfinite().all() for one in now)
    assert all(0 < (a - b).abs().max() < 5 for a, b in zip(now, before, strict=True))


def test_a_scaler_that_is_disabled_does_not_scale_for_the_user():
    net, optimizer, x, _ = parts(torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with apply_speedups(net, FP16, optimizer=optimizer)[1]:
        scaler.scale(net(x).mean() * 1e-7).backward()
        assert net[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("precision", "asked", "scales"),
    [("fp32", "auto", False), ("bf16", "auto", False), ("fp16", "auto", True),
     ("fp16", False, False)],
)  # fmt: skip
def test_the_plans_scaler_scales_for_fp16_alone_unless_it_is_refused(precision, asked, scales):
    net, optimizer, x, y = parts(torch.optim.SGD)
    before, config = weights(net), SpeedConfig(precision=precision, grad_scaler=asked)
    with apply_speedups(net, config, optimizer=optimizer)[1] as context:
        assert context.grad_scaler.is_enabled() == scales
        assert ("may underflow" in context.plan["grad_scaler"].reason) == (asked is False)
        with context.autocast():
            loss = LOSS(net(x).float(), y)
        context.grad_scaler.scale(loss).backward()
        context.grad_scaler.step(optimizer)
        context.grad_scaler.update()
    assert all(one.isfinite().all() for one in weights(net))
    assert not any(map(torch.equal, weights(net), before))
