"""Saved results survive other writers and sudden deaths."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from speedkit_jupyter import SpeedKitError
from speedkit_jupyter.support import database

WRITER = """
import sys
from speedkit_jupyter.support import database
for number in range(int(sys.argv[2])):
    database.save(sys.argv[1], {"variants": [], "number": number, "filler": "x" * 100_000})
    print(number, flush=True)
"""


def writer(name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_is_saved_comes_back_in_order():
    for number in range(3):
        database.save("a", {"variants": [], "number": number})
    database.save("b", {"variants": []})
    assert [one.value["number"] for one in database.saved("a")] == [0, 1, 2]
    assert [one.name for one in database.saved()] == ["a", "a", "a", "b"]
    assert database.forget("a") == 3
    assert [one.name for one in database.saved()] == ["b"]


def test_reading_before_anything_was_saved_makes_no_file():
    assert database.saved() == []
    assert not database.folder().exists()


@pytest.fixture
def held() -> Iterator[Callable[[str], None]]:
    """`held("IMMEDIATE")`: from here on another connection has that lock."""
    database.save("a", {"variants": []})
    with closing(sqlite3.connect(database.folder() / database.FILE)) as connection:
        connection.isolation_level = None
        yield lambda kind: connection.execute(f"BEGIN {kind}")


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_lock_elsewhere_is_named(held, monkeypatch, lock) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.05)
    held(lock)
    with pytest.raises(SpeedKitError, match="another process has been writing"):
        database.save("a", {"variants": []})


@pytest.mark.parametrize("folder", ["data", ".", "a/b"])
def test_a_relative_folder_is_the_same_wherever_the_process_goes(
    tmp_path, monkeypatch, folder
) -> None:
    monkeypatch.setattr(database, "START", str(tmp_path))
    monkeypatch.setenv(database.FOLDER, folder)
    database.save("a", {"variants": []})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(database.saved()) == 1
    assert database.folder() == tmp_path / folder


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")
def test_folders_that_are_made_are_their_owners_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(database.FOLDER, str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        database.save("a", {"variants": []})
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
        assert [one.value["number"] for one in database.saved(name)] == list(range(20))


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is for POSIX")
def test_a_kill_in_a_write_loses_nothing_that_was_saved_before():
    database.save("kept", {"variants": [], "number": 1})
    for delay_s in (0.0, 0.003, 0.01):
        one = writer("killed", 10_000)
        assert one.stdout is not None
        done = int(one.stdout.readline())
        time.sleep(delay_s)
        one.send_signal(signal.SIGKILL)
        rest = one.communicate(timeout=300)[0].splitlines()
        done = int(rest[-1]) if rest and rest[-1].isdigit() else done
        assert [kept.value["number"] for kept in database.saved("kept")] == [1]
        numbers = [kept.value["number"] for kept in database.saved("killed")]
        assert numbers[: done + 1] == list(range(done + 1))
        database.forget("killed")
