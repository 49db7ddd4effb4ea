"""The example scripts run with few steps, from any folder."""

from __future__ import annotations

import runpy
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
    "rollout": (
        "3 steps in",
        ("--config", str(ROOT / "tests" / "extras" / "rollouts" / "plain.yaml")),
    ),
}


def test_every_script_is_tested() -> None:
    known = {file.stem for file in SCRIPTS.glob("*.py") if file.stem[0] != "_"}
    assert known == {*PRINTS, "compare"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_a_script_runs_with_few_steps(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends, options = PRINTS[name]
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, name, "--steps", "3", *options)
    assert ends in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("trainer", ("--config", "none.yaml"), "none.yaml: there is no such file"),
        ("trainer", ("--steps", "0"), "--steps: 1 or more"),
        ("bert", ("--model", "nowhere"), "nowhere is no folder of save_pretrained()"),
        ("rollout", ("--config", str(ROOT / "configs" / "exact.yaml")), "keyword argument 'alone'"),
    ],
)
def test_a_wrong_option_is_one_line(
    name: str,
    options: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, name, *options)
    assert says in capsys.readouterr().err


def run(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    """Run a script as `python FILE OPTIONS` does, in this process: it loads torch once for all."""
    if name == "bert":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
def test_compare_times_a_script_under_each_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; assert sys.argv[1:3] == ['--lr', '1']; print(sys.argv)")
    configs = str(ROOT / "configs" / "exact.yaml")
    options = ("--script", str(script), "--configs", configs, "--rounds", "2", "--", "--lr", "1")
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "compare", *options)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["baseline", "exact"]


def test_compare_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "compare", "--script", "none.py")
    assert "no such file: none.py" in capsys.readouterr().err
