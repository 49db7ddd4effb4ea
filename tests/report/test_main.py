"""python -m speedkit_jupyter.report."""

from __future__ import annotations

import json

import pytest

from speedkit_jupyter.machines import flags
from speedkit_jupyter.report.__main__ import main


def test_without_options_it_shows_the_plan_and_changes_nothing(capsys):
    before = flags.snapshot()
    assert main([]) == 0
    assert "Plan for a demonstration model" in capsys.readouterr().out
    assert flags.diff(before, flags.snapshot()) == ()


def test_apply_shows_what_changed(capsys):
    assert main(["--apply", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"name": "AdamW.fused", "before": None, "after": True} in report["changes"]


def test_restore_shows_that_nothing_is_left(capsys):
    assert main(["--restore"]) == 0
    assert "are as they were" in capsys.readouterr().out


def test_apply_and_restore_shows_both(capsys):
    assert main(["--apply", "--restore"]) == 0
    shown = capsys.readouterr().out
    assert "Applied to" in shown
    assert "Restored" in shown


def test_a_wrong_config_is_one_line_and_exit_status_2(capsys, tmp_path):
    (tmp_path / "wrong.yaml").write_text("precison: bf16\n")
    assert main(["--config", str(tmp_path / "wrong.yaml")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "line 1: precison: unknown key" in shown.err


def test_an_unknown_option_ends_with_usage():
    with pytest.raises(SystemExit):
        main(["--aply"])
