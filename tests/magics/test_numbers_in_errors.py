"""The numbers of cell and lines in an error of a measured cell are those of the notebook."""

from __future__ import annotations

import re

import pytest
from IPython.utils.capture import capture_output

COLOURS = re.compile(r"\x1b\[[\d;]*m")
# Of each kind the lines that an arrow points at end with this.
HERE = "  # here"
KINDS = {
    "the first line": f"1 / 0{HERE}",
    "a middle line": f"a = 1\n1 / 0{HERE}\nb = 2",
    "after empty lines": f"\n\n1 / 0{HERE}",
    "a statement of several lines": f"a = [\n    1,\n    1 / 0,{HERE}\n]",
    "a function of this cell": f"def f(a):\n    return a / 0{HERE}\n\n\nf(1){HERE}",
    "a class body": f"a = 1\nclass A:{HERE}\n    b = 1\n    c = 1 / 0{HERE}",
    "a function of an earlier cell": f"a = 1\nearly(){HERE}",
    "within a module": f"import json\njson.loads('{{'){HERE}",
    "a reason": f"try:\n    1 / 0{HERE}\nexcept Exception as e:\n    raise KeyError from e{HERE}",
    "in a loop": f"for i in range(3):\n    1 / (1 - i){HERE}",
    "a magic before": f"%time a = 1\n1 / 0{HERE}",
    "a name": f"a = 1\nnowhere{HERE}",
}  # fmt: skip
WAYS = (
    "%%speedbench",
    "%%speedbench -n 1 -r 1 -v kept start = 1",
    "%%speedbench --compare baseline,bf16 --budget 0.1 --model model -q",
    "%%speedbench --tune --fresh --budget 0.1 --model model",
)
MODEL = "import torch\nmodel = torch.nn.Linear(4, 4)\nx = torch.rand(2, 4)"
EARLY = "def early():\n    a = 1\n    raise KeyError('early')"
# As IPython of today and of then calls a cell.
CELL = r"(?:Cell In\[{0}\], line|<ipython-input-{0}-[0-9a-f]+> in)"


def arrows(shown, number):
    """What arrows point at in the frames of the cell of this number: a line's number and text."""
    found, inside = [], False
    for line in shown.splitlines():
        if re.match(r"(Cell In|<ipython-input-|File |/|~|\S+Error)", line):
            inside = re.match(CELL.format(number), line) is not None
        if inside and (arrow := re.match(r"-+> *(\d+) ?(.*)", line)):
            found.append((int(arrow[1]), arrow[2].partition(HERE)[0].strip()))
    return found


def expected(cell):
    """The lines of a cell that are marked."""
    marked = ((i, line) for i, line in enumerate(cell.splitlines(), 1) if line.endswith(HERE))
    return {(i, line.removesuffix(HERE).strip()) for i, line in marked}


def is_ours(shown):
    """Whether it names a loop of ours, or something in it."""
    return "speedbench_" in shown or "<locals>._" in shown


def run(shell, cell):
    """As a notebook does: cells are counted. Its number, and what it showed."""
    with capture_output() as captured:
        result = shell.ip.run_cell(cell, store_history=True)
    assert not result.success
    return result.execution_count, COLOURS.sub("", captured.stdout)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_arrows_point_at_the_notebooks_own_lines(shell, kind, way):
    shell.ip.run_cell(EARLY, store_history=True)
    cell = f"{way}\n{KINDS[kind]}"
    number, shown = run(shell, cell)
    assert set(arrows(shown, number)) == expected(cell), shown
    assert not is_ours(shown), shown


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS[::2])
@pytest.mark.parametrize("kind", ["after empty lines", "a function of this cell"])
def test_numbers_hold_under_any_ipython(shell, kind, way):
    test_arrows_point_at_the_notebooks_own_lines(shell, kind, way)
