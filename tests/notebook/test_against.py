"""%%speedbench --against FUNCTION: a cell that stands for a function."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

pytestmark = pytest.mark.usefixtures("made_time")

REFERENCE = "def reference(x):\n    return x.softmax(-1)"
CELL = "e = x.sub(x.amax(-1, keepdim=True)).exp()\ne / e.sum(-1, keepdim=True)"
LINE = "%%speedbench --against reference --budget 100 -v found\n"


def test_a_cell_is_checked_and_binds_nothing(shell):
    shell.run(REFERENCE)
    before = shell.names["x"]
    shown = shell.run(f"{LINE}{CELL}")
    assert "cell is right at 1 size" in shown
    assert shell.names["found"].passed
    assert shell.names["x"] is before
    assert "e" not in shell.names


def test_what_the_cell_and_the_function_change_is_put_back(shell):
    shell.run(f"log = []\n{REFERENCE.replace('return', 'log.append(1); return')}")
    shell.run(f"{LINE}log.append(torch.rand(1)); x.softmax(-1)")
    assert shell.names["log"] == []


def test_a_wrong_cell_is_named(shell):
    shell.run(REFERENCE)
    shown = shell.run(f"{LINE}x.softmax(0)")
    assert "cell is wrong" in shown
    assert "given: output" in shown
    assert not shell.names["found"].passed


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("--against reference", "e = x", "end the cell with the expression"),
        ("--against refrence", "x", "reference"),
        ("--against of_more", "x", "parameter more is no name"),
        ("--against reference -n 3", "x", "-n does not go with --against"),
    ],
)
def test_what_can_not_be_checked_is_said(shell, line, cell, message):
    shell.run(f"{REFERENCE}\ndef of_more(more):\n    return more")
    error = shell.fails(f"%%speedbench {line}\n{cell}")
    assert isinstance(error, UsageError)
    assert message in str(error)
