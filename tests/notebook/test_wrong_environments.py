"""A variable that says what is not allowed is one line: its name, its value, what is allowed."""

from __future__ import annotations

import re

import pytest
import torch

from speedkit_jupyter.catalog import CATALOG

pytestmark = pytest.mark.usefixtures("made_time")

VARIABLES = [entry.variable for entry in CATALOG if entry.variable]


@pytest.fixture
def fresh(loaded_shell):
    """A notebook in which the extension is loaded, and nothing else was done."""
    loaded_shell.names |= {"model": torch.nn.Linear(2, 2), "x": torch.rand(1, 2)}
    loaded_shell.run("def train():\n    model(x).sum().backward()")
    return loaded_shell


def says(line, variable, value):
    entry = next(entry for entry in CATALOG if entry.variable == variable)
    assert len(line.splitlines()) == 1
    words = f"environment variable {variable}: {entry.name}"
    assert re.search(rf"{words}(\.\w+)?: '{value}' is not allowed; allowed: \S", line), line


@pytest.mark.smoke
@pytest.mark.parametrize("variable", VARIABLES)
def test_it_does_so_for_every_variable(fresh, monkeypatch, variable):
    monkeypatch.setenv(variable, "bogus")
    says(str(fresh.fails("%speedkit")), variable, "bogus")
    monkeypatch.delenv(variable)
    assert fresh.run("%speedkit")  # and works once it is right


def test_one_that_is_set_in_the_middle_of_a_session_counts_and_a_plan_can_still_be_undone(
    fresh, monkeypatch
):
    fresh.run("%speedkit apply model --tf32 highest")
    monkeypatch.setenv("SPEEDKIT_PRECISION", "bogus")
    says(str(fresh.fails("%speedkit")), "SPEEDKIT_PRECISION", "bogus")
    assert "Restored" in str(fresh.run("%speedkit restore"))
    monkeypatch.setenv("SPEEDKIT_PRECISION", "fp32")
    assert "SPEEDKIT_PRECISION" in str(fresh.run("%speedkit explain precision"))
