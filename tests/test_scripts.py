"""The example scripts run with few steps, from any folder."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "notebooks" / "scripts"
# Text that each script prints, and its options in addition to --steps.
PRINTS = {
    "transformer": ("3 steps in", ("--batch", "2")),
    "resnet": ("images that it has not seen", ("--batch", "2")),
    "bert": ("3 steps in", ("--batch", "2")),
    "fp16": ("the scale ends at", ("--batch", "2")),
    "trainer": ("in 3 steps", ("--batch", "2")),
    "rollout": ("3 steps in", ("--config", str(ROOT / "tests/extras/rollouts/plain.yaml"))),
}


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a script as `python FILE OPTIONS` does, in this process."""

    def run(name: str, *options: str) -> None:
        if name == "bert":
            pytest.importorskip("transformers")
        monkeypatch.syspath_prepend(SCRIPTS)
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")

    return run


def test_every_script_is_tested():
    known = {file.stem for file in SCRIPTS.glob("*.py") if file.stem[0] != "_"}
    assert known == {*PRINTS, "compare"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_a_script_runs_with_few_steps(run, name, tmp_path, monkeypatch, capsys):
    ends, options = PRINTS[name]
    monkeypatch.chdir(tmp_path)
    run(name, "--steps", "3", *options)
    assert ends in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("trainer", ("--config", "none.yaml"), "none.yaml: there is no such file"),
        ("trainer", ("--steps", "0"), "--steps: 1 or more"),
        ("bert", ("--model", "nowhere"), "nowhere is no folder of save_pretrained()"),
        ("rollout", ("--config", str(ROOT / "configs" / "exact.yaml")), "keyword argument 'alone'"),
        ("compare", ("--script", "none.py"), "no such file: none.py"),
    ],
)
def test_a_wrong_option_is_one_line(run, name, options, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(name, *options)
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_compare_times_a_script_under_each_config(run, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import sys; assert sys.argv[1:3] == ['--lr', '1']; print(sys.argv)")
    configs = str(ROOT / "configs" / "exact.yaml")
    options = ("--script", str(script), "--configs", configs, "--rounds", "2", "--", "--lr", "1")
    with pytest.raises(SystemExit, match="0"):
        run("compare", *options)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["baseline", "exact"]
