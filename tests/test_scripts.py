"""The example scripts run with few steps, from another folder too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "notebooks" / "scripts"
# What each prints at the end, and its options beside --steps.
PRINTS = {
    "transformer": ("3 steps in", ("--batch", "2")),
    "resnet": ("images that it has not seen", ("--batch", "2")),
    "bert": ("3 steps in", ("--batch", "2")),
    "fp16": ("the scale ends at", ("--batch", "2")),
    "trainer": ("in 3 steps", ("--batch", "2")),
    "rollout": ("3 steps in", ("--config", str(ROOT / "tests" / "rollouts" / "plain.yaml"))),
}


def run(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPEEDKIT_DATA": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_every_script_is_tested() -> None:
    known = {file.stem for file in SCRIPTS.glob("*.py") if file.stem[0] != "_"}
    assert known == {*PRINTS, "compare"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_a_script_runs_from_its_command_line(name: str, tmp_path: Path) -> None:
    ends, options = PRINTS[name]
    found = run(name, "--steps", "3", *options, folder=tmp_path)
    assert ends in found.stdout, found.stderr


@pytest.mark.slow
def test_compare_times_a_script_under_each_config(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; assert sys.argv[1:3] == ['--lr', '1']; print(sys.argv)")
    configs = str(ROOT / "configs" / "exact.yaml")
    options = ("--script", str(script), "--configs", configs, "--rounds", "2", "--", "--lr", "1")
    found = run("compare", *options, folder=tmp_path)
    assert [line.split()[0] for line in found.stdout.splitlines()[1:]] == ["baseline", "exact"]


@pytest.mark.slow
def test_compare_names_what_is_missing(tmp_path: Path) -> None:
    found = run("compare", "--script", "none.py", folder=tmp_path)
    assert found.returncode == 2
    assert "no such file: none.py" in found.stderr
