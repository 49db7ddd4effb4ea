"""The store survives concurrent writers and kills; bad files and rows give one-line errors."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter import ConfigError, Hardware, SpeedConfig, SpeedKitError
from speedkit_jupyter.support import database

WRITER = """
import sys
from speedkit_jupyter.support import database
for number in range(int(sys.argv[2])):
    database.keep("search", sys.argv[1], str(number), {"number": number, "filler": "x" * 100_000})
    print(number, flush=True)
"""


def writer(name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def save(name: str, number: int = 0) -> None:
    database.keep("search", name, str(number), {"number": number})


def saved(name: str | None = None) -> list[int]:
    return [one.value["number"] for one in database.kept("search", name)]


def test_what_is_saved_comes_back_in_order_and_replaces_its_task():
    for name, number in (("a", 2), ("a", 0), ("b", 1), ("a", 2)):
        save(name, number)
    assert saved("a") == [0, 2]
    assert saved() == [0, 1, 2]


def test_plans_are_deleted_by_number_or_all():
    for setting in ("a", "b", "c"):
        database.learn(setting, "task", json.loads(PLAN))
    first, *_ = database.learned()
    assert database.unlearn([first.number, 99]) == 1
    assert [one.name for one in database.learned()] == ["b", "c"]
    assert database.unlearn(None) == 2
    assert database.learned() == []


def test_reading_before_anything_was_saved_makes_no_file():
    assert saved() == []
    assert not database.folder().exists()


@pytest.fixture
def held() -> Iterator[Callable[[str], None]]:
    """Yield a function that takes a lock of the given kind in another connection."""
    save("a")
    with closing(sqlite3.connect(database.folder() / database.FILE)) as connection:
        connection.isolation_level = None
        yield lambda kind: connection.execute(f"BEGIN {kind}")


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_lock_elsewhere_is_named(held, monkeypatch, lock) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.05)
    held(lock)
    with pytest.raises(SpeedKitError, match="another process has been writing"):
        save("a")


@pytest.mark.parametrize("folder", ["data", ".", "a/b"])
def test_a_relative_folder_is_the_same_wherever_the_process_goes(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(database, "START", str(tmp_path))
    monkeypatch.setenv(database.FOLDER, folder)
    save("a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert saved() == [0]
    assert database.folder() == tmp_path / folder


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")
def test_folders_that_are_made_are_their_owners_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(database.FOLDER, str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        save("a")
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_two_processes_may_write_at_once():
    writers = [writer(name, 20) for name in ("a", "b")]
    for one in writers:
        one.communicate(timeout=300)
        assert one.returncode == 0
    for name in ("a", "b"):
        assert saved(name) == list(range(20))


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is for POSIX")
def test_a_kill_in_a_write_loses_nothing_that_was_saved_before():
    save("kept", 1)
    for delay_s in (0.0, 0.003, 0.01):
        name = f"killed after {delay_s}"
        one = writer(name, 10_000)
        assert one.stdout is not None
        done = int(one.stdout.readline())
        time.sleep(delay_s)
        one.send_signal(signal.SIGKILL)
        rest = one.communicate(timeout=300)[0].splitlines()
        done = int(rest[-1]) if rest and rest[-1].isdigit() else done
        assert saved("kept") == [1]
        assert saved(name)[: done + 1] == list(range(done + 1))


def check(error: ConfigError, file: Path) -> None:
    """Check that each problem is one line with the file's name."""
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


PLAN = (
    '{"name": "bf16", "values": {"precision": "bf16"}, "speedup": 2, "low": 1, "high": null, '
    '"parameters": 3, "device": "CPU", "model": "Net", "inputs": [], "trains": true}'
)
PARTS = json.loads(PLAN)
LACKING = [{one: value for one, value in PARTS.items() if one != key} for key in PARTS]
BROKEN = ("{bad", "", "[1]", "3", "[" * 100_000, 7, b"", "{}", *map(json.dumps, LACKING))


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_row_that_can_not_be_read_is_named_and_left_out(capsys, broken: object) -> None:
    database._note_once.cache_clear()
    for setting in ("a", "b"):
        database.learn(setting, "task", json.loads(PLAN))
    with closing(sqlite3.connect(database.folder() / "speedkit.sqlite")) as elsewhere, elsewhere:
        elsewhere.execute("UPDATE entries SET value = ? WHERE id = 1", (broken,))

    assert [one.number for one in database.learned()] == [2]
    (line,) = capsys.readouterr().out.splitlines()
    assert "can't be read and is left out" in line
    assert len(line) < 200


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", "loop", "file"])
def test_a_folder_that_can_not_be_is_a_line(tmp_path: Path, monkeypatch, folder: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(database.FOLDER, folder if folder[0] == "~" else str(tmp_path / folder))
    with pytest.raises(SpeedKitError, match="can't be used"):
        save("a")
    with suppress(SpeedKitError):
        assert saved() == []
