"""--save, %speedkit history, and saved names as variants."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

pytestmark = pytest.mark.usefixtures("trusted")

STEP = "loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.smoke
def test_a_saved_result_is_listed_and_compared_with_the_next(shell):
    assert "Nothing saved yet" in shell.run("%speedkit history")
    shell.run(f"%%speedbench --compare baseline,auto --budget 0.3 --save step\n{STEP}")
    again = shell.run(f"%%speedbench --compare baseline,auto --budget 0.3 --save step\n{STEP}")
    assert "baseline: " in again
    assert " today " in again
    listed = shell.run("%speedkit history")
    assert "step" in listed
    assert "1 saved name" in listed
    shown = shell.run("%speedkit history step")
    assert "2 results" in shown
    assert "this is the newest" in shown


def test_a_timing_is_saved_too(shell):
    for _ in range(2):
        again = shell.run("%%speedbench -n 10 --save sum\nsum(range(10))")
    assert "cell: " in again


def test_a_saved_name_stands_for_its_best_plan(shell, monkeypatch):
    shell.run(f"%%speedbench --compare baseline,auto --budget 0.3 --save mine -v found\n{STEP}")
    best = shell.names["found"].best
    shown = shell.run(f"%%speedbench --compare baseline,mine --budget 0.3 -v again\n{STEP}")
    if best is not None:
        assert shell.names["again"].records[1].applied == best.applied
    assert "mine" in shown


def test_forget_deletes_a_name(shell):
    shell.run("%%speedbench -n1 -r1 --save one\n1")
    assert "Deleted 1 result" in shell.run("%speedkit history one --forget")
    assert "Nothing saved yet" in shell.run("%speedkit history")


def test_a_folder_that_cannot_be_written_is_one_line(shell, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path / "file" / "data"))
    error = shell.fails("%%speedbench -n1 -r1 --save one\n1")
    assert isinstance(error, UsageError)
    assert "SPEEDKIT_DATA" in str(error)
