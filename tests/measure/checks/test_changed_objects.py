"""What a step leaves behind is as the baseline leaves it: parameters that nothing leads, what the
same gradients do, words, counts and modes. `tests/benchmarks/_left.py` has the kinds.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from _left import LEFT
from planted import accused, examined, word
from torch import nn

from speedkit_jupyter import benchmark


def checked(step, model, optimizer, plan):
    torch.manual_seed(1)
    return examined(step, [plan], model, optimizer).records[1]


@pytest.mark.sampled(26)
@pytest.mark.parametrize("one", LEFT, ids=lambda one: f"{one.group}: {one.name}")
def test_what_is_left_wrong_is_seen_and_the_same_step_without_it_is_not_accused(one):
    torch.manual_seed(1)
    found = checked(*one.make())
    assert word(found) in ("wrong", "not checked"), found.accuracy
    torch.manual_seed(1)
    honest = checked(*one.honest())
    assert word(honest) in ("exact", "rounding"), honest.accuracy


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "made",
    ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"],
)
def test_the_same_gradients_lead_each_optimizer_to_the_same_parameters(made):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                          nn.Linear(8 * 36, 5))  # fmt: skip
    optimizer = getattr(torch.optim, made)(model.parameters())
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    found = examined(step, ["fused_optimizer", "channels_last"], model, optimizer)
    rows = list(accused(found, made))
    assert rows
    assert all(row["ok"] for row in rows), rows


def test_the_imaginary_part_of_a_parameter_counts_and_nothing_warns():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
    model.forward = lambda x: x @ model.weight
    optimizer = torch.optim.Adam(model.parameters())
    x, before = torch.randn(4, 8, dtype=torch.cfloat), torch.get_num_threads()

    def step():
        model.forward(x).abs().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.get_num_threads() != before:
            with torch.no_grad():
                model.weight.imag.mul_(1.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checked(step, model, optimizer, f"threads:{before + 1}")
    assert word(found) == "wrong", found.accuracy


@pytest.mark.slow
def test_where_rounding_decides_how_often_a_model_is_called_nothing_is_checked():
    torch.manual_seed(1)
    model, x = nn.Linear(16, 16), torch.randn(8, 16)

    def step():
        hidden = x
        with torch.no_grad():
            for _ in range(50):
                new = torch.tanh(model(hidden))
                if (new - hidden).abs().max() < 1e-4:
                    break
                hidden = new
        return hidden


def test_what_the_compiler_notes_on_parameters_is_nothing_that_the_step_says():
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"said": ""}
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.rand(3, 4)

    def step():
        kept["said"] = "two words"
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = benchmark(step, "baseline,compile:eager", model=model, budget_s=0.5)
    assert found.records[1].accuracy.verdict == "exact", found.records[1]
    torch._dynamo.reset()
