"""One default each: the help, the docstrings and the pages name the constants of the code."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest

from speedkit_jupyter import Panel, benchmark, tune, verify
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.speedbench import parser
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.search.races import ENOUGH_STEPS, SearchBudget
from speedkit_jupyter.search.verification import STEPS

DOCS = Path(__file__).parents[2] / "docs"


def words(text: str | None) -> str:
    return " ".join(str(text).split())


@pytest.mark.parametrize(
    "text",
    [
        tune.__doc__,
        (DOCS / "tuning.md").read_text(encoding="utf-8"),
        (DOCS / "reference.md").read_text(encoding="utf-8"),
    ],
    ids=["docstring", "tuning", "reference"],
)
def test_the_default_budget_of_a_search_is_the_one_of_the_code(text):
    assert f"{DEFAULT_BUDGET_S:g} s, or {ENOUGH_STEPS} steps if these take longer" in words(text)
    assert SearchBudget(None).seconds == DEFAULT_BUDGET_S


@pytest.mark.parametrize(
    ("function", "name"),
    [(tune, "budget_s"), (benchmark, "budget_s"), (Panel, "budget_s"), (Panel, "tune_budget_s")],
)
def test_no_signature_has_a_budget_of_its_own(function, name):
    assert signature(function).parameters[name].default is None


def test_help_names_the_defaults_of_the_code():
    benches = dict(parser().described())
    assert f"({DEFAULT_BUDGET_S:g}, or more if a step is long)" in benches["--budget SECONDS"]
    assert f"({STEPS})" in dict(commands()["verify"].described())["--steps NUMBER"]
    assert signature(verify).parameters["steps"].default == STEPS
