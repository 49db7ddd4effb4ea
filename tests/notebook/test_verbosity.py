"""Messages next to results: one channel, by word or by the environment."""

from __future__ import annotations

import logging

import pytest

from speedkit_jupyter.support import messages

pytestmark = pytest.mark.usefixtures("made_time")


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
    shell.names["messages"] = messages
    said = shell.run(
        "messages.important('warning'); messages.note('note'); messages.debug('detail')"
    )
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
