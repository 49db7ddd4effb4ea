"""%%speedbench --profile as a user types it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("made_time")

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.smoke
def test_the_parts_of_a_step_stand_in_a_table(shell):
    shown = shell.run(f"%%speedbench --profile --budget 0.5 -v found\n{STEP}")
    for word in ("forward", "backward", "optimizer", "rest", "share", "a step:"):
        assert word in shown
    found = shell.names["found"]
    assert sum(row["share"] for row in found.rows()) == pytest.approx(1)
    assert json.loads(found.to_json())["steps"] == 1
    assert "loss" not in shell.names


def test_a_line_that_waits_is_named_by_its_cell_and_line(shell):
    shell.run("def total(loss):\n    return loss.item()")
    shown = shell.run(
        f"%%speedbench --profile --budget 0.5 -v found\n{STEP}\nprinted = total(loss)\n"
        "again = float(loss)"
    )
    rows = shell.names["found"].to_dict()["synchronizations"]
    places = {row["source"]: row["place"] for row in rows}
    assert places["return loss.item()"].startswith("cell ")
    assert places["return loss.item()"].endswith("line 2")
    assert places["again = float(loss)"].endswith("line 4")
    assert "return loss.item()" in shown
