"""What is profiled from Python is called as its user calls it."""

from __future__ import annotations

import sys

import torch
from torch import nn

from speedkit_jupyter import profile
from speedkit_jupyter.profiling import lines

critic = nn.Sequential(nn.Linear(2, 1))


def of_the_file() -> None:
    critic(torch.ones(1, 2))


def test_models_are_called_by_the_variables_of_where_the_step_was_defined():
    writer = nn.Sequential(nn.Linear(2, 1))

    def step() -> None:
        critic(torch.ones(1, 2)).sum() + writer(torch.ones(1, 2)).sum()

    names = lines.models_of(step)
    assert (names[id(writer)], names[id(critic)]) == ("writer", "critic")
    assert lines.models_of(of_the_file) == {id(critic): "critic"}
    assert lines.models_of(torch.relu) == {}


def test_a_profile_s_modules_have_them():
    found = profile(of_the_file, model=critic, budget_s=1)
    assert found.costs is not None
    assert {cost.name.partition(".")[0] for cost in found.costs.modules} == {"critic"}


def test_outside_of_a_notebook_cells_have_no_numbers(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # of tests that ran before
    assert lines.cells() == {}
