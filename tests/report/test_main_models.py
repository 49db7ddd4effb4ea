"""python -m speedkit_jupyter.report for the user's own models."""

from __future__ import annotations

import json

import pytest

from speedkit_jupyter.machines import flags
from speedkit_jupyter.report.__main__ import main

MODELS = """
import torch
from helper import WIDTH
def net():
    return torch.nn.Linear(WIDTH, 2)
def trained():
    model = net()
    return model, torch.optim.SGD(model.parameters(), 0.1)
def several():
    model = net()
    return model, [torch.optim.SGD([p], 0.1) for p in model.parameters()]
def broken():
    raise RuntimeError("mine\\nand more")
def number():
    return 3
def exits():
    raise SystemExit(3)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper.py").write_text("WIDTH = 7\n")
    (tmp_path / "my_models.py").write_text(MODELS)
    yield tmp_path / "my_models.py"
    import sys

    for name in ("my_models", "helper"):
        sys.modules.pop(name, None)


def test_without_apply_the_flags_are_shown_as_they_are_and_would_be(capsys):
    before = flags.snapshot()
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["flags"]) == set(before)
    assert {"name": "AdamW.fused", "before": None, "after": True} in report["would_change"]
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name in before:
        assert name in shown
    assert flags.diff(before, flags.snapshot()) == ()


@pytest.mark.parametrize(("name", "optimizers"), [("net", 0), ("trained", 1), ("several", 2)])
def test_a_function_in_a_file_makes_the_model(capsys, file, name, optimizers):
    assert main(["--model", f"{file}:{name}", "--json"]) == 0
    assert "plan" in json.loads(capsys.readouterr().out)
    assert main(["--model", f"{file}:{name}"]) == 0
    shown = capsys.readouterr().out
    assert f"{file}:{name}" in " ".join(shown.split()).replace(" ", "") or name in shown
    assert ("SGD.fused" in shown) is bool(optimizers)


def test_apply_and_restore_as_json_are_one_document(capsys):
    assert main(["--apply", "--restore", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["applied"]["active"]
    assert report["restored"]["changes"] == []


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("{file}:nte", ["there is no function 'nte'", "Did you mean 'net'?"]),
        ("{file}:broken", ["broken() raises RuntimeError: mine"]),
        ("{file}:number", ["it makes a int"]),
        ("{file}:exits", ["exits() raises SystemExit"]),
        ("{file}", ["write FILE:NAME"]),
        ("{file}:", ["write FILE:NAME"]),
        ("{folder}/my_modles.py:net", ["there is no file", "Did you mean 'my_models.py'?"]),
        ("{folder}/wrong.py:net", ["raises SyntaxError"]),
    ],
)
def test_what_goes_wrong_with_it_is_one_line_and_exit_status_2(capsys, file, wish, words):
    (file.parent / "wrong.py").write_text("def net(:\n")
    assert main(["--model", wish.format(file=file, folder=file.parent)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
    for one in words:
        assert one in shown.err
