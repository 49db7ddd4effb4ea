"""Steps of unusual forms: transforms of torch.func, optimizers that step within the backward pass
or run it, gradients of no leaf. Rounding is not accused, a fault is, and nothing warns.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from planted import examined
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from speedkit_jupyter.catalog.inference import Inference
from speedkit_jupyter.rounds.runner import Runner

pytestmark = pytest.mark.usefixtures("made_time")

FEATURES = 3


def per_sample(model, x):
    def loss(parameters, one):
        return functional_call(model, parameters, (one,)).square().mean()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)["0.weight"]


def dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def with_noise(model, x):
    return vmap(lambda one: model(one + torch.randn(FEATURES)), randomness="different")(x)


TRANSFORMS = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap, random": with_noise,
    "vmap of grad": per_sample,
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x: vmap(jacrev(model))(x),
    "dual numbers": dual,
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


def closed(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def of_lbfgs():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    return model, closed(model, optimizer)


def with_a_buffer_in_a_graph():
    model = nn.Linear(3, 3)
    model.register_buffer("state", model.weight * 2)
    return model, closed(model, torch.optim.SGD(model.parameters(), 0.01))


def with_a_weight_that_is_no_leaf():
    model = nn.Linear(3, 3)
    model._parameters["weight"] = model._parameters["weight"] * 1.0
    return model, lambda: model(torch.ones(2, 3)).sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    "make", [of_lbfgs, with_a_buffer_in_a_graph, with_a_weight_that_is_no_leaf]
)
def test_no_warning_of_gradients_of_no_leaf(make):
    model, step = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not a leaf.*")
        result = examined(step, ["threads:2", "channels_last"], model)
    assert not any("leaf" in (record.failure or "") for record in result.records)


@pytest.mark.parametrize(
    ("kind", "calls"), [("training", 2), ("random", 2), ("iterator", 2), ("inference", 1)]
)
def test_a_step_that_leaves_and_draws_nothing_is_checked_by_one_call(monkeypatch, kind, calls):
    model, x, observed = torch.nn.Linear(FEATURES, 2), torch.randn(6, FEATURES), Runner.observed
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches, seen = iter([torch.randn(6, FEATURES) for _ in range(99)]), []

    def noted(*given, **options):
        run = observed(*given, **options)
        seen.append(len(run.ends))
        return run

    def train():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = {
        "training": train,
        "random": lambda: model(torch.randn(6, FEATURES)),
        "iterator": lambda: model(next(batches)),
        "inference": lambda: model(x),
    }
    monkeypatch.setattr(Runner, "observed", noted)
    examined(steps[kind], ["bf16"], model, optimizer if kind == "training" else None)
    assert max(seen) == calls


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
