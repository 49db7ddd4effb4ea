"""--save and %speedkit history."""

from __future__ import annotations

import sqlite3

import pytest
from IPython.core.error import UsageError

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.search import learning
from speedkit_jupyter.support import database

pytestmark = pytest.mark.usefixtures("made_time", "trusted")

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.smoke
def test_a_saved_result_is_listed_with_the_next(shell):
    assert "Nothing saved yet" in shell.run("%speedkit history")
    for _ in range(2):
        shell.run(f"%%speedbench --compare baseline,auto --budget 0.3 --save mine\n{STEP}")
    assert "1 saved name" in shell.run("%speedkit history")
    assert "2 results" in shell.run("%speedkit history mine")


def test_a_folder_that_cannot_be_written_is_one_line(shell, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path / "file" / "data"))
    error = shell.fails("%%speedbench -n1 -r1 --save one\n1")
    assert isinstance(error, UsageError)
    assert "SPEEDKIT_DATA" in str(error)


def test_what_can_not_be_read_is_a_line_below_what_can(shell):
    for _ in range(2):
        database.save("kept", {"variants": [], "environment": {}})
        database.learn("setting", "task", {"name": "x"})
    connection = sqlite3.connect(database.folder() / "speedkit.sqlite")
    with connection:
        connection.execute("UPDATE entries SET value = '{bad' WHERE id = 1")
    connection.close()
    for line in ("history", "history kept"):
        shown = shell.run(f"%speedkit {line}")
        assert "result 1 can't be read and is left out: it is no JSON" in shown
    assert "plan 4 can't be read" in " ".join(shell.run("%speedkit tuned").split())
    assert "Forgot 1" in shell.run("%speedkit tuned forget 4")
    assert "Deleted 2 results" in shell.run("%speedkit history kept --forget")


def test_a_learned_plan_that_lacks_a_part_ends_no_command(shell):
    where = learning.setting([shell.names["model"]], Hardware.current())
    database.learn(where, "task", {"name": "x", "values": {}, "speedup": 2})
    said = shell.run("%speedkit")
    assert (
        "plan 1 can't be read and is left out: it is no JSON, or lacks a part (parameters" in said
    )
    for line in ("apply model", "tuned", "catalog", "panel model", "restore"):
        shell.run(f"%speedkit {line}")
    assert "Forgot 1" in shell.run("%speedkit tuned forget 1")
