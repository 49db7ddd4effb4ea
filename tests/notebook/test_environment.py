"""Check one-line errors for wrong values of environment variables, and the verbosity."""

import logging
import re

import pytest
import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.support import messages

VARIABLES = [entry.variable for entry in CATALOG if entry.variable]


@pytest.fixture
def fresh(loaded_shell):
    loaded_shell.names |= {"model": torch.nn.Linear(2, 2), "x": torch.rand(1, 2)}
    loaded_shell.run("def train():\n    model(x).sum().backward()")
    return loaded_shell


def says(line, variable, value):
    entry = next(entry for entry in CATALOG if entry.variable == variable)
    assert len(line.splitlines()) == 1
    words = f"environment variable {variable}: {entry.name}"
    assert re.search(rf"{words}(\.\w+)?: '{value}' is not allowed; allowed: \S", line), line


@pytest.mark.smoke
@pytest.mark.parametrize("variable", VARIABLES)
def test_it_does_so_for_every_variable(fresh, monkeypatch, variable):
    for word in ("bogus", "²"):
        monkeypatch.setenv(variable, word)
        says(str(fresh.fails("%speedkit")), variable, word)
    monkeypatch.delenv(variable)
    assert fresh.run("%speedkit")  # works once the wrong value is gone


def test_one_that_is_set_in_a_session_counts_and_a_plan_can_still_be_undone(fresh, monkeypatch):
    fresh.run("%speedkit apply model --tf32 highest")
    monkeypatch.setenv("SPEEDKIT_PRECISION", "bogus")
    says(str(fresh.fails("%speedkit")), "SPEEDKIT_PRECISION", "bogus")
    assert "Restored" in str(fresh.run("%speedkit restore"))
    monkeypatch.setenv("SPEEDKIT_PRECISION", "fp32")
    assert "SPEEDKIT_PRECISION" in str(fresh.run("%speedkit explain precision"))


@pytest.fixture(autouse=True)
def as_it_was():
    level = messages.LOGGER.level
    yield
    messages.LOGGER.setLevel(level)


@pytest.mark.parametrize(
    ("word", "shown"),
    [("quiet", {"warning"}), ("normal", {"warning", "note"}),
     ("debug", {"warning", "note", "detail"})],
)  # fmt: skip
def test_the_word_says_how_much_is_shown(shell, word, shown):
    messages.LOGGER.setLevel(messages.LEVELS[word])
    shell.names["ours"] = messages
    said = shell.run("ours.important('warning'); ours.note('note'); ours.debug('detail')")
    assert {*said.split()} == shown
    assert messages.verbosity() == word


def test_a_quiet_session_still_names_what_cant_be_put_back(shell, tmp_path):
    messages.LOGGER.setLevel(messages.LEVELS["quiet"])
    shell.names["file"] = open(tmp_path / "log", "w")  # noqa: SIM115
    shown = shell.run("%%speedbench -n 1 -r 1\nfile.write('x')")
    assert "nor put back" in " ".join(shown.split())
    shell.run("file.close()")


def test_the_environment_says_it_for_a_program(monkeypatch):
    monkeypatch.setenv("SPEEDKIT_VERBOSITY", "quiet")
    messages.LOGGER.setLevel(logging.NOTSET)
    assert messages.verbosity() == "quiet"


def test_a_warning_points_to_the_users_line():
    with pytest.warns(UserWarning, match="mine") as caught:
        messages.warn("mine")
    assert caught[0].filename == __file__
