"""In float32 little is allowed; what a plan has nothing to do with may not change at all."""

from __future__ import annotations

import os

import pytest
import torch
from _nets import net
from _packed import gradient_times
from planted import examined, training_step, word
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


def tanh(x):
    return functional.gelu(x, approximate="tanh")


# What becomes of the output, and of the activation.
OUTPUTS = {
    "5e-5 too large": (lambda out: out * (1 + 5e-5), functional.gelu),
    "shifted": (lambda out: out + 5e-5, functional.gelu),
    "another GELU": (lambda out: out, tanh),
}
GRADIENTS = {
    "gradient 1e-3 too large": (gradient_times(1.001), functional.gelu),
    "gradient of half of it": (
        lambda out: out,
        lambda x: gradient_times(0.999)(functional.gelu(x)),
    ),
}


class Net(nn.Module):
    def __init__(self, output, activation, in_force):
        super().__init__()
        self.one, self.other = nn.Linear(16, 64), nn.Linear(64, 8)
        self.output, self.activation, self.in_force = output, activation, in_force

    def forward(self, x):
        wrong = self.in_force()
        hidden = (self.activation if wrong else functional.gelu)(self.one(x))
        return self.output(self.other(hidden)) if wrong else self.other(hidden)


def judged(plan, output, activation, drops=0.0):
    torch.manual_seed(0)

    def in_force():
        return optimizer.param_groups[0].get("fused") or torch.get_num_threads() == 2

    model, x = Net(output, activation, in_force), torch.randn(64, 16)
    labels = torch.randint(8, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        out = functional.dropout(model(x), drops)
        functional.cross_entropy(out, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return examined(step, [plan], model, optimizer).records[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plan", "name"),
    [*(("fused_optimizer", one) for one in OUTPUTS), ("threads:2", "another GELU")],
)
def test_an_output_that_is_off_by_more_than_float32_is_wrong(name, plan):
    found = judged(plan, *OUTPUTS[name])
    assert word(found) == "wrong", found.accuracy


@pytest.mark.sampled(4)
@pytest.mark.parametrize("drops", [0.0, 0.2])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_fused_optimizer_changes_no_gradient(name, drops):
    found = judged("fused_optimizer", *GRADIENTS[name], drops)
    assert word(found) == "wrong", found.accuracy
    assert "nothing but the optimizer" in found.accuracy.reason


@pytest.mark.parametrize("drops", [0.0, 0.2])
def test_one_that_does_not_is_right(drops):
    found = judged("fused_optimizer", lambda out: out, functional.gelu, drops)
    assert word(found) == "exact", found.accuracy


def test_a_step_that_rounds_otherwise_each_time_accuses_nobody():
    torch.manual_seed(0)
    model, x = nn.Linear(16, 8), torch.randn(64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        noise = 1 + 1e-5 * os.urandom(1)[0] / 256
        (model(x) * noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = examined(step, ["fused_optimizer"], model, optimizer).records[1]
    assert word(found) in ("exact", "rounding"), found.accuracy


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["mlp batchnorm", "residual", "lstm", "conv1d", "attention",
                                  "encoder", "cnn batchnorm", "hourglass", "inverted residuals",
                                  "gpt2", "mistral", "vit"])  # fmt: skip
def test_other_kernels_in_float32_are_right(name):
    model, forward, loss = net(name)
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3)
    plans = ["fused_optimizer", "channels_last", "threads:2", "sdpa:math"]
    step = training_step(model, forward, loss, optimizer)
    for record in examined(step, plans, model, optimizer).records[1:]:
        assert record.failure or word(record) in ("exact", "rounding"), record.accuracy
