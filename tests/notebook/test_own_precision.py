"""The precision of a plan in force: it acts in the cell as it is written, and is measured so."""

from __future__ import annotations

import pytest

from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.outcome import Tuning

pytestmark = pytest.mark.usefixtures("made_time", "trusted")

NOTED = "handle = model[0].register_forward_hook(lambda *it: seen.put(it[2].dtype))"
PLAIN = "model(x).sum().backward()"
INSIDE = "with ctx.autocast():\n    model(x)"


@pytest.fixture
def found(shell) -> Tuning:
    """A search of a cell that has found bf16."""
    from speedkit_jupyter.rounds.from_function import step_of

    model, x = shell.names["model"], shell.names["x"]
    step = step_of(lambda: model(x).sum().backward())
    tuning = Tuning(step)
    tuning.winner = Candidate({"precision": "bf16"})
    shell.names["tuning"] = tuning
    return tuning


def test_applying_what_tuning_found_sets_ctx_and_acts_at_once(shell, found):
    shell.run("contexts = tuning.apply()")
    assert shell.names["ctx"] is shell.names["contexts"][0]
    shell.run("before = []\nhandle = model[0].register_forward_hook(lambda *it: "
              "before.append(it[2].dtype))\nresult = model(x)")  # fmt: skip
    assert str(shell.names["before"]) == "[torch.bfloat16]"
    assert str(shell.names["result"].dtype) == "torch.float32"


def test_a_context_of_another_model_keeps_its_name(shell, found):
    shell.run("other = nn.Linear(2, 2)\n%speedkit apply other --threads 1")
    shell.run("tuning.apply()")
    assert shell.names["ctx_model"].plan["precision"].value == "bf16"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_apply_says_that_nothing_is_to_be_edited(shell, precision):
    shown = shell.run(f"%speedkit apply model --threads 1 --precision {precision}")
    assert shown.lstrip().startswith("Applied to model")
    assert "Nothing to edit" in shown


@pytest.mark.parametrize("cell", [PLAIN, INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("line", ["-n 1 -r 2", "--compare current --budget 0.2 -v found"])
def test_a_cell_as_it_stands_runs_in_the_plans_precision(shell, seen, cell, line):
    shell.run(f"{NOTED}\n%speedkit apply model --precision bf16")
    shell.run(f"%%speedbench {line}\n{cell}")
    assert {str(one) for one in seen()} == {"torch.bfloat16"}
    if "compare" in line:
        assert "precision" in shell.names["found"].records[0].applied
