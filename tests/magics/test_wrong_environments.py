"""A variable that says what is not allowed is one line: its name, its value, what is allowed."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import torch
from IPython.core.error import UsageError

from speedkit_jupyter import ConfigError, Facts, SpeedConfig, apply_speedups, benchmark, plan
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.report.__main__ import main

VARIABLES = [entry.variable for entry in CATALOG if entry.variable]
LINES = (
    "%speedkit",
    "%speedkit status",
    "%speedkit apply model",
    "%speedkit report",
    "%speedkit catalog",
    "%speedkit explain precision",
    "%speedkit panel model",
    "%speedkit code model",
    "%speedkit config",
    "%speedkit history",
    "%speedkit tuned",
    "%speedkit verify --step train --steps 2",
    "%%speedbench\nmodel(x)",
    "%%speedbench --compare baseline,bf16 --budget 0.1\nmodel(x)",
    "%%speedbench --tune --budget 0.1\nmodel(x)",
)
CALLS = {
    "config": lambda model: SpeedConfig(),
    "plan": lambda model: plan(facts=Facts.read(model)),
    "apply": lambda model: apply_speedups(model),
    "benchmark": lambda model: benchmark(
        lambda: model(torch.rand(1, 2)), model=model, budget_s=0.1
    ),
}


@pytest.fixture
def fresh(plain_shell):
    """A notebook in which the extension is loaded, and nothing else was done."""
    plain_shell.ip.run_line_magic("load_ext", "speedkit_jupyter")
    plain_shell.names |= {"model": torch.nn.Linear(2, 2), "x": torch.rand(1, 2)}
    plain_shell.run("def train():\n    model(x).sum().backward()")
    yield plain_shell
    plain_shell.ip.run_line_magic("unload_ext", "speedkit_jupyter")


def says(line, variable, value):
    entry = next(entry for entry in CATALOG if entry.variable == variable)
    assert len(line.splitlines()) == 1
    words = f"environment variable {variable}: {entry.name}"
    assert re.search(rf"{words}(\.\w+)?: '{value}' is not allowed; allowed: \S", line), line


@pytest.mark.parametrize("line", LINES)
def test_every_magic_says_it_in_one_line(fresh, monkeypatch, line):
    monkeypatch.setenv("SPEEDKIT_PRECISION", "bogus")
    error = fresh.fails(line)
    assert isinstance(error, UsageError)
    says(str(error), "SPEEDKIT_PRECISION", "bogus")


@pytest.mark.smoke
@pytest.mark.parametrize("variable", VARIABLES)
def test_it_does_so_for_every_variable(fresh, monkeypatch, variable):
    monkeypatch.setenv(variable, "bogus")
    says(str(fresh.fails("%speedkit")), variable, "bogus")
    monkeypatch.delenv(variable)
    assert fresh.run("%speedkit")  # and works once it is right


@pytest.mark.parametrize("line", ["%speedkit apply model", "%%speedbench --compare auto\nmodel(x)"])
def test_one_that_is_set_in_the_session_is_one_line_too(shell, monkeypatch, line):
    shell.run("%speedkit")
    monkeypatch.setenv("SPEEDKIT_THREADS", "many")
    error = shell.fails(line)
    assert isinstance(error, UsageError)
    says(str(error).removeprefix("%%speedbench: "), "SPEEDKIT_THREADS", "many")


@pytest.mark.parametrize("call", CALLS)
def test_from_python_it_is_the_errors_message(monkeypatch, call):
    monkeypatch.setenv("SPEEDKIT_PRECISION", "bogus")
    with pytest.raises(ConfigError) as told:
        CALLS[call](torch.nn.Linear(2, 2))
    says(str(told.value), "SPEEDKIT_PRECISION", "bogus")


@pytest.mark.parametrize("options", [(), ("--json",), ("--apply",), ("--restore",)])
def test_the_command_line_prints_it(monkeypatch, options):
    monkeypatch.setenv("SPEEDKIT_THREADS", "bogus")
    shown = io.StringIO()
    with redirect_stderr(shown):
        assert main(options) == 2
    says(shown.getvalue().strip(), "SPEEDKIT_THREADS", "bogus")


@pytest.mark.slow
def test_the_command_itself_prints_one_line(monkeypatch):
    monkeypatch.setenv("SPEEDKIT_PRECISION", "bogus")
    command = [sys.executable, "-m", "speedkit_jupyter.report"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert not ran.stdout
    says(ran.stderr.strip(), "SPEEDKIT_PRECISION", "bogus")


def test_all_wrong_variables_are_named_at_once(fresh, monkeypatch):
    for variable in ("SPEEDKIT_PRECISION", "SPEEDKIT_THREADS"):
        monkeypatch.setenv(variable, "bogus")
    lines = str(fresh.fails("%speedkit")).splitlines()
    assert [line.split("SPEEDKIT_")[1].partition(":")[0] for line in lines] == [
        "THREADS",
        "PRECISION",
    ]
