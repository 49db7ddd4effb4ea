"""What makes much of rounding, or holds nothing but rounding, is not accused.

`tests/benchmarks/planted.py --part amplifying` tries all nets; these were accused once.
"""

from __future__ import annotations

import pytest
import torch
from _amplifying import nets
from planted import OPTIMIZERS, accused, examined, training_step
from torch import nn

from speedkit_jupyter.measure.checks.comparing.buffers import misled
from speedkit_jupyter.measure.checks.comparing.parameter_moves import astray
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.reference import rounding

ACCUSED = {
    "mlp, batchnorm, 2 samples, 1": "bf16",  # a momentum of earlier gradients that were noise
    "excited without norm, 2": "bf16",  # a parameter that stays in the baseline too
    "mobilenet, 2 images, 3": "fp16",  # controls whose Adafactor divided zero by zero
    "vgg with norm, 3": "fp16",
    "instance norm, 3": "fp16",  # a ReLU that tips over in one step, and in no control there
    "mlp, batchnorm, deep, 0": "fp16",
}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def verdicts(name, word):
    found = list(nets())
    number = [each for each, _ in found].index(name)
    model, forward, loss = found[number][1]()
    optimizer = OPTIMIZERS[number % len(OPTIMIZERS)](model.parameters())
    step = training_step(model.train(), forward, loss, optimizer)
    return list(accused(examined(step, [word], model, optimizer), name))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ACCUSED)
def test_a_net_that_amplifies_rounding_is_not_accused(one_thread, name):
    for row in verdicts(name, ACCUSED[name]):
        assert row["ok"], row


MEANS = [("running_mean", "running_var", 2.0), ("obs_mean", "obs_std", 1.0), ("mean", "var", 2.0)]


@pytest.mark.parametrize(("mean", "scatter", "power"), MEANS)
@pytest.mark.parametrize("noise", [(), (1e-11, None)])
def test_a_mean_that_is_zero_holds_what_float32_left_of_its_numbers(mean, scatter, power, noise):
    size = 0.05
    other = torch.full((32,), 1e-10, dtype=torch.float64)
    spread = torch.full((32,), size**power, dtype=torch.float64)
    baseline = Observation(buffers=[other, spread], buffers_before=[0 * other, 0 * spread])
    names = [f"norm.{mean}", f"norm.{scatter}"]

    def off_by(value):
        seen = Observation(buffers=[other + value, spread])
        return misled(seen, baseline, names, noise, lowered=False)

    assert not off_by(8 * 2.0**-24 * size)
    assert off_by(1e-3 * size).startswith(f"buffer norm.{mean} is off")


def test_of_where_rounding_alone_leads_anywhere_nothing_is_said():
    def led(way):
        gradient = torch.ones(4, dtype=torch.float64)
        return Observation(gradients=[gradient], way=[torch.as_tensor(way).double()], moved=1.0)

    baseline, seen, exact = led([1.0] * 4), led([-1.0] * 4), led([1.001] * 4)
    assert "of their way off" in astray(seen, baseline, [exact])
    assert not astray(seen, baseline, [led([float("nan")] * 4), exact])


@pytest.mark.parametrize("make", [nn.Linear(6, 3), nn.Conv2d(2, 3, 2)], ids=type)
def test_a_control_rounds_no_gradient_that_has_arrived(make):
    """A parameter's has the parameter's dtype: its square may be smaller than float16 knows."""
    x = torch.randn(2, 6) if isinstance(make, nn.Linear) else torch.randn(2, 2, 3, 3)
    with rounding.rounded("fp16", loss_scale=2.0**16):
        (1e-5 * make(x).sum()).backward()
        squares = [p.grad.square() for p in make.parameters()]
    for parameter, square in zip(make.parameters(), squares, strict=True):
        assert torch.equal(square, parameter.grad.square())
        assert bool(square.any())


@pytest.mark.parametrize("steps", [True, False])
def test_a_momentum_may_move_what_an_earlier_gradient_led_and_nothing_else_may(steps):
    def moved_by(gradient, count):
        other = torch.ones(4, dtype=torch.float64)  # which a gradient leads
        way = [torch.full((4,), 1e-3 * count, dtype=torch.float64), other]
        return Observation(gradients=[gradient, other], way=way, movers=[count, 4],
                           updates=way if steps else [])  # fmt: skip

    earlier = Observation(gradients=[torch.ones(4, dtype=torch.float64)])
    seen, baseline = moved_by(None, 4), moved_by(None, 0)
    found = astray(seen, baseline, [], None, [earlier])
    assert bool(found) is not steps
    assert "where it stays" in astray(seen, baseline, [])
