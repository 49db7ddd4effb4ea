"""--save and %speedkit history."""

from __future__ import annotations

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


def test_a_learned_plan_that_lacks_a_part_is_noted_and_ends_no_command(shell):
    database._note_once.cache_clear()
    where = learning.setting([shell.names["model"]], Hardware.current())
    database.learn(where, "task", {"name": "x", "values": {}, "speedup": 2})
    assert "plan 1 can't be read and is left out: it lacks device" in shell.run("%speedkit")
    for line in ("apply model", "tuned", "catalog", "panel model", "restore"):
        shell.run(f"%speedkit {line}")
    assert "Forgot 1" in shell.run("%speedkit tuned forget 1")
