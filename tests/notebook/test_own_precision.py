"""A plan in force whose precision the cell does not enter: said, and measured as it is."""

from __future__ import annotations

import pytest

from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.outcome import Tuning

pytestmark = pytest.mark.usefixtures("made_time", "trusted")

PLAIN = "seen.put(torch.is_autocast_enabled('cpu')); model(x).sum().backward()"
INSIDE = "with ctx.autocast():\n    seen.put(torch.is_autocast_enabled('cpu')); model(x)"


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


def test_applying_what_tuning_found_sets_ctx_and_says_what_to_write(shell, found):
    shown = shell.run("contexts = tuning.apply()")
    assert shown.startswith("Write `with ctx.autocast():` around your forward")
    assert shell.names["ctx"] is shell.names["contexts"][0]
    shell.run("with ctx.autocast():\n    seen = model(x).dtype")
    assert str(shell.names["seen"]) == "torch.bfloat16"


def test_a_context_of_another_model_keeps_its_name(shell, found):
    shell.run("other = nn.Linear(2, 2)\n%speedkit apply other --threads 1")
    assert "with ctx_model.autocast" in shell.run("tuning.apply()")
    assert shell.names["ctx_model"].plan["precision"].value == "bf16"


def test_apply_begins_with_what_to_write_and_says_where_nothing_is(shell):
    shown = shell.run("%speedkit apply model --precision bf16")
    assert shown.lstrip().startswith("Write `with ctx.autocast():` around your forward pass")
    shown = shell.run("%speedkit apply model --threads 1 --precision fp32")
    assert shown.lstrip().startswith("Applied to model")
    assert "Nothing to edit" in shown
    assert "autocast():" not in shown


@pytest.mark.parametrize("cell", [PLAIN, INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("line", ["-n 1 -r 2", "--compare current --budget 0.2 -v found"])
def test_a_cell_as_it_stands_runs_in_its_own_precision(shell, seen, cell, line):
    shell.run("%speedkit apply model --precision bf16")
    shown = shell.run(f"%%speedbench {line}\n{cell}")
    assert set(seen()) == {cell is INSIDE}
    assert ("bf16 acts only inside `ctx.autocast()`" in shown) == (cell is PLAIN)
    if "compare" in line:
        assert ("precision" in shell.names["found"].records[0].applied) == (cell is INSIDE)
