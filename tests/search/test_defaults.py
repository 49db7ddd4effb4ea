"""The help, the docstrings and the pages name the same default values as the code."""

from inspect import signature
from pathlib import Path

import pytest

from speedkit_jupyter import Panel, benchmark, tune, verify
from speedkit_jupyter.extras.verify.verification import STEPS
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.speedbench import parser
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.search.races import SearchBudget
from speedkit_jupyter.search.thresholds import ENOUGH_STEPS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_default_budget_of_a_search_is_the_one_of_the_code():
    pages = [(DOCS / f"{one}.md").read_text(encoding="utf-8") for one in ("tuning", "reference")]
    for text in (tune.__doc__, *pages):
        said = f"{DEFAULT_BUDGET_S:g} s, or {ENOUGH_STEPS} steps if these take longer"
        assert said in " ".join(text.split())
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
