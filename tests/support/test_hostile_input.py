"""Malformed files and rows: one clear line."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter import ConfigError, Hardware, SpeedConfig, SpeedKitError
from speedkit_jupyter.support import database


def check(error: ConfigError, file: Path) -> None:
    """A line for each mistake, with the file's name."""
    assert error.problems
    assert all(str(file) in line and "\n" not in line for line in error.problems)


PIECES = st.sampled_from(
    ["a", "precision", "compile", "threads", ": ", "\n", "  ", "- ", "&a ", "*a", "<<: ", "[",
     "]", "{", "}", ", ", "? ", "!!int ", "!!bool ", "!", "|\n", ">", "'", '"', "#", "%", "1",
     "0x1", "é", "bf16", "true", "~", "\t", "@", "`", "---\n", "...\n", "\\ud800", "\0"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=60))
def test_any_text_is_a_config_or_a_config_error(tmp_path_factory, text: str) -> None:
    file = tmp_path_factory.mktemp("any") / "speed.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        SpeedConfig.from_yaml(file)
    except ConfigError as error:
        check(error, file)


BOMBS = {
    "aliases": "a: &a [1]\n" + "".join(f"{i}: &{i} [*a, *a]\n" for i in range(9)),
    "merged": "a: &a {b: 1}\nc: {<<: [*a, *a]}",
    "deep": "a: " + "[" * 60_000,
    "long": "# " + "a" * 70_000,
    "a number": f"threads: {'9' * 5000}",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("read", [SpeedConfig.from_yaml, Hardware.from_json])
def test_a_file_that_would_take_all_time_or_memory_is_a_line(tmp_path, name, read) -> None:
    (tmp_path / "bomb").write_text(BOMBS[name] if read == SpeedConfig.from_yaml else "[" * 60_000)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "bomb")
    check(caught.value, tmp_path / "bomb")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("read", [SpeedConfig.from_yaml, Hardware.from_json])
def test_what_never_ends_is_not_read(tmp_path, read) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull), tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            read(path)


# --- the store ---

RESULT = '{"variants": [{"name": "baseline", "times_s": [0.1, 0.2]}], "environment": {}}'
PLAN = (
    '{"name": "bf16", "values": {"precision": "bf16"}, "speedup": 2, "low": 1, "high": null, '
    '"parameters": 3, "device": "CPU", "model": "Net", "inputs": [], "trains": true}'
)
PARTS = json.loads(PLAN)
LACKING = [{one: value for one, value in PARTS.items() if one != key} for key in PARTS]
BROKEN = ("{bad", "", "[1]", "3", "[" * 100_000, 7, b"", "{}", *map(json.dumps, LACKING))


def rewrite(column: str, value: object) -> None:
    """Spoil the first result and the first plan, as another program would."""
    connection = sqlite3.connect(database.folder() / "speedkit.sqlite")
    with connection:
        connection.execute(f"UPDATE entries SET {column} = ? WHERE id < 3", (value,))
    connection.close()


def two_rows() -> None:
    """The first of which is broken afterwards."""

    for setting in ("a", "b"):
        database.save("kept", json.loads(RESULT))
        database.learn(setting, "task", json.loads(PLAN))


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_row_that_can_not_be_read_is_named_and_left_out(capsys, broken: object) -> None:
    database._note_once.cache_clear()
    two_rows()
    rewrite("value", broken)
    assert [one.number for one in database.saved()] == [3]
    assert [one.number for one in database.learned()] == [4]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "can't be read and is left out" in line
        assert len(line) < 200


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", "loop", "file"])
def test_a_folder_that_can_not_be_is_a_line(tmp_path: Path, monkeypatch, folder: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(database.FOLDER, folder if folder[0] == "~" else str(tmp_path / folder))
    with pytest.raises(SpeedKitError, match="can't be used"):
        database.save("a", {})
    with suppress(SpeedKitError):
        assert database.saved() == []
