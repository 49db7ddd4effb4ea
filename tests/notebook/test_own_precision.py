"""The precision of a plan in force: it acts in the cell as it is written, and is measured so."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("made_time", "trusted")

NOTED = "handle = model[0].register_forward_hook(lambda *it: seen.put(it[2].dtype))"
PLAIN = "model(x).sum().backward()"
INSIDE = "with ctx.autocast():\n    model(x)"


@pytest.mark.parametrize("cell", [PLAIN, INSIDE], ids=["plain", "inside"])
@pytest.mark.parametrize("line", ["-n 1 -r 2", "--compare current --budget 0.2 -v found"])
def test_a_cell_as_it_stands_runs_in_the_plans_precision(shell, seen, cell, line):
    shell.run(f"{NOTED}\n%speedkit apply model --precision bf16")
    shell.run(f"%%speedbench {line}\n{cell}")
    assert {str(one) for one in seen()} == {"torch.bfloat16"}
    if "compare" in line:
        assert "precision" in shell.names["found"].records[0].applied
