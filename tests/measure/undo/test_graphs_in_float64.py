"""What can't be asked of a graph of before after a check in float64 is named before it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.subject.step import StateWarning

LINE = "torch.autograd.grad() does not find the parameters from there"
# Held by names of the notebook that the step does not know; `True` where it can still be asked.
BEFORE = {
    "outputs": ("held = model(x)", True),
    "a loss": ("held = model(x).square().mean()", True),
    "in a list": ("held = [model(x).square().mean()]", True),
    "in a dict": ("held = {'a': model(x)}", True),
    "of one parameter": ("held = (model.weight * 2).exp()", True),
    "a loss that went back": ("held = model(x).square().mean(); held.backward()", False),
    "detached": ("held = model(x).detach()", False),
    "of another model": ("held = other(x).square()", False),
    "none": ("held = None", False),
}
STEPS = {
    "inference": "return model(x)",
    "training": (
        "loss = model(x).square().mean(); loss.backward(); optimizer.step(); "
        "optimizer.zero_grad(); return loss"
    ),
}


def notebook(before: str, step: str) -> dict[str, Any]:
    names: dict[str, Any] = {
        "__name__": "__main__",
        "model": nn.Linear(4, 4),
        "other": nn.Linear(4, 4),
        "x": torch.rand(2, 4),
    }
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.1)
    exec(before, names)
    exec(f"def step():\n    {step}", names)
    return names


def measured(names: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StateWarning)
        benchmark(names["step"], "baseline,bf16", budget_s=0.2)
    return [str(one.message) for one in said if LINE in str(one.message)]


def can_be_asked(held: Any, model: nn.Module) -> bool:
    tensor = next(
        iter(
            held.values() if isinstance(held, dict) else held if isinstance(held, list) else [held]
        )
    )
    found = torch.autograd.grad(
        tensor.sum(), list(model.parameters()), allow_unused=True, retain_graph=True
    )
    return any(one is not None for one in found)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", BEFORE)
def test_it_works_as_before_or_is_named(kind, step):
    before, could = BEFORE[kind]
    names = notebook(before, STEPS[step])
    lines = measured(names)
    assert bool(lines) == could, lines
    assert not lines or "held" in lines[0]
    if could and not lines:
        assert can_be_asked(names["held"], names["model"])


def test_a_backward_pass_works_as_before():
    names = notebook(BEFORE["a loss"][0], STEPS["training"])
    model, held = names["model"], names["held"]
    expected = torch.autograd.grad(held, list(model.parameters()), retain_graph=True)
    measured(names)
    held.backward()
    for one, parameter in zip(expected, model.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)


def test_one_variant_alone_is_checked_against_nothing():
    names = notebook(BEFORE["a loss"][0], STEPS["training"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", StateWarning)
        benchmark(names["step"], "baseline", budget_s=0.05)
    assert can_be_asked(names["held"], names["model"])
