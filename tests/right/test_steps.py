"""Steps of unusual forms: transforms of torch.func, optimizers that step within the backward pass
or run it, gradients of no leaf. Rounding is not accused, a fault is, and nothing warns.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from planted import examined
from torch.func import functional_call, grad, jvp, vmap

from speedkit_jupyter.catalog.inference import Inference

FEATURES = 3


def per_sample(model, x):
    def loss(parameters, one):
        return functional_call(model, parameters, (one,)).square().mean()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)["0.weight"]


def with_noise(model, x):
    return vmap(lambda one: model(one + torch.randn(FEATURES)), randomness="different")(x)


TRANSFORMS = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap, random": with_noise,
    "vmap of grad": per_sample,
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_with_transforms_is_measured_and_judged(name, trains):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(6, FEATURES)

    def train():
        loss = TRANSFORMS[name](model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def infer():
        return TRANSFORMS[name](model, x).detach()

    plans = ["fused_optimizer", "bf16"] if trains else ["bf16"]
    for record in examined(train if trains else infer, plans, model, optimizer).records:
        assert record.failure is None, record.failure
        assert record.accuracy.verdict in ("exact", "rounding"), record.accuracy
        assert record.accuracy.output_error is not None


def in_force():
    return not torch.backends.cuda.flash_sdp_enabled()


def judged(spoil):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    )
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    optimizers = {one: torch.optim.Adam([one], 1e-3, foreach=False) for one in model.parameters()}

    def hook(one):
        if spoil is not None and in_force() and one is model[0].weight:
            spoil(one)
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return examined(step, ["bf16+sdpa:math"], model, list(optimizers.values())).records[1].accuracy


SPOILT = {
    "right": (None, "rounding"),
    "stays": (lambda one: one.grad.zero_(), "wrong"),
    "turns": (lambda one: one.grad.neg_(), "wrong"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_parameter_that_goes_elsewhere_is_seen_and_a_sign_of_rounding_not_accused(name):
    spoil, verdict = SPOILT[name]
    found = judged(spoil)
    assert found.verdict == verdict, found


def test_a_plan_that_keeps_its_first_result_is_wrong_where_the_step_draws(monkeypatch):
    model, kept = torch.nn.Linear(FEATURES, 2), {}
    whole = Inference.applied

    @contextmanager
    def stale(self, decision, target):
        def forward(x):
            return kept.setdefault(len(x), torch.nn.functional.linear(x, model.weight, model.bias))

        with whole(self, decision, target), monkeypatch.context() as patch:
            patch.setattr(model, "forward", forward)
            kept.clear()
            yield

    monkeypatch.setattr(Inference, "applied", stale)
    found = examined(lambda: model(torch.randn(6, FEATURES)), ["inference"], model.eval())
    assert found.records[1].accuracy.verdict == "wrong"
