"""torch warns where a tensor that holds no gradient is asked for one: a benchmark asks none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark

LEAF = "not a leaf"


class Mine(torch.optim.Optimizer):
    """By hand, as in many a notebook."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        loss = closure() if closure else None
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                momentum.add_(parameter.grad)
                parameter.data.add_(momentum, alpha=-0.01)
        return loss


def closure_of(optimizer, model):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    return closure


OPTIMIZERS = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "LBFGS with a search": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "by hand": Mine,
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("given", ["its own", "another"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_warning_with_any_optimizer(kind, given):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = OPTIMIZERS[kind](model.parameters())
    closure = closure_of(optimizer, model)

    def step():
        other(torch.ones(1, 3))
        return optimizer.step(closure)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{LEAF}.*")
        result = benchmark(
            step,
            "baseline,threads:1",
            model=model if given == "its own" else other,
            budget_s=0.3,
        )
    assert not [record for record in result.records if LEAF in (record.failure or "")]


def test_no_warning_with_a_buffer_that_hangs_in_a_graph():
    model = nn.Linear(3, 3)
    model.register_buffer("state", model.weight * 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step():
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{LEAF}.*")
        benchmark(step, "baseline,bf16", budget_s=0.3)


def test_no_warning_with_a_weight_that_is_no_leaf():
    model = nn.Linear(3, 3)
    weight = model._parameters["weight"]
    model._parameters["weight"] = weight * 1.0

    def step():
        model(torch.ones(2, 3)).sum().backward(retain_graph=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{LEAF}.*")
        benchmark(step, "baseline,channels_last", model=model, budget_s=0.3)
