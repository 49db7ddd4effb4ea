"""Compiled code in a file: exported, imported elsewhere; attacked."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from speedkit_jupyter import SpeedKitError
from speedkit_jupyter.machines import compile_archive, compile_cache
from speedkit_jupyter.support import database, reading

CODE = f"{compile_cache.COMPILED}/ab/code.py"
BUNDLE = f"{compile_cache.BUNDLES}/{'0' * 64}"

PLAN = {
    "name": "baseline", "values": {}, "parameters": 3, "device": "CPU", "model": "Net",
    "inputs": [], "trains": True, "speedup": None, "low": None, "high": None,
}  # fmt: skip


def kept() -> dict[str, bytes]:
    folder = compile_cache.place()
    every = [path for _, _, path in compile_cache.files(folder)]
    names = {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}
    return {name: content for name, content in names.items() if name != compile_cache.TRIAL}


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """An archive of two files and a plan, on a machine that has none of them any more."""
    folder = compile_cache.prepare()
    assert folder is not None
    for name in (CODE, BUNDLE, f"{compile_cache.COMPILED}/locks/one.lock"):
        compile_cache.write(folder / name, name.encode())
    database.learn("here", "task", PLAN)
    assert compile_archive.save(tmp_path / "archive") == (2, 1)
    monkeypatch.setenv("SPEEDKIT_DATA", str(tmp_path / "other"))
    return tmp_path / "archive"


def rewritten(archive: Path, change) -> Path:
    """The archive once `change` was made to its manifest and its files."""
    with zipfile.ZipFile(archive) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    manifest = json.loads(files.pop(compile_archive.MANIFEST))
    change(manifest, files)
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(compile_archive.MANIFEST, json.dumps(manifest))
        for name, content in files.items():
            packed.writestr(name, content)
    return archive


def test_what_was_exported_is_there_again(archive) -> None:
    assert compile_archive.load(archive) == (2, 1)
    assert kept() == {name: name.encode() for name in (CODE, BUNDLE)}
    assert [(one.name, one.task) for one in database.learned()] == [("here", "task")]
    assert compile_archive.load(archive) == (0, 0)
    assert compile_archive.clear()[0] >= 2
    assert kept() == {}
    assert len(database.learned()) == 1


def test_an_archive_that_is_there_is_not_written_over(archive) -> None:
    with pytest.raises(SpeedKitError, match="File exists"):
        compile_archive.save(archive)


def test_a_failed_export_leaves_nothing_that_blocks_the_next(archive, monkeypatch) -> None:
    again = archive.with_name("again")
    compile_cache.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(SpeedKitError, match="again: disk full"):
            compile_archive.save(again)
    assert compile_archive.save(again) == (0, 0)
    assert not [*archive.parent.glob("*.part")]


ATTACKS = {
    "code.py does not match its checksum": lambda manifest, files: files.update({CODE: b"other"}),
    "the files that its manifest names": lambda manifest, files: files.update({"more": b""}),
    "machine: torch 1.0, here": lambda manifest, files: manifest["machine"].update(torch="1.0"),
    "its format is 9": lambda manifest, files: manifest.update(format=9),
    "damaged": lambda manifest, files: manifest.update(machine=3),
    "SpeedKit's, or damaged": lambda manifest, files: manifest.update(plans=[{}]),
    "Not a directory": lambda manifest, files: _add(manifest, files, f"{CODE}/b"),
    "name too long": lambda manifest, files: _add(manifest, files, f"{CODE}{'b' * 300}"),
    "can't be used: 'utf-8'": lambda manifest, files: manifest["plans"][0].update(task="\ud800"),
}


def _add(manifest, files, name) -> None:
    files[name] = b""
    manifest["files"][name] = hashlib.sha256(b"").hexdigest()


PATHS = ["../evil", "inductor/../../evil", "/evil", "inductor\\..\\evil", "C:/evil", "trial.so"]


@pytest.mark.parametrize("line", ATTACKS)
def test_an_archive_that_is_not_as_it_was_written_is_refused_whole(archive, line) -> None:
    with pytest.raises(SpeedKitError, match=line):
        compile_archive.load(rewritten(archive, ATTACKS[line]))
    assert (kept(), database.learned()) == ({}, [])


LIMITS = {
    "than the cache may be": (compile_archive, "MOST_BYTES"),
    "manifest is too large": (compile_archive, "MOST_MANIFEST"),
    "more than 10 values": (reading, "MOST_VALUES"),
}


@pytest.mark.parametrize("line", LIMITS)
def test_a_small_archive_that_unfolds_to_much_is_refused(archive, monkeypatch, line) -> None:
    monkeypatch.setattr(*LIMITS[line], 10)
    with pytest.raises(SpeedKitError, match=line):
        compile_archive.load(archive)
    assert kept() == {}


@pytest.mark.parametrize("name", PATHS)
def test_no_file_is_written_outside_of_the_cache(archive, name) -> None:
    def change(manifest, files) -> None:
        manifest["files"][name] = manifest["files"].pop(CODE)
        files[name] = files.pop(CODE)

    with pytest.raises(SpeedKitError, match="names a file outside of the cache"):
        compile_archive.load(rewritten(archive, change))
    assert kept() == {}
    assert not list(archive.parent.rglob("*evil"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")
def test_an_archive_that_others_can_write_to_is_refused(archive) -> None:
    archive.chmod(0o666)
    with pytest.raises(SpeedKitError, match="others can write to it"):
        compile_archive.load(archive)
    assert kept() == {}


def test_what_is_no_archive_is_a_line(tmp_path) -> None:
    with pytest.raises(SpeedKitError, match="No such file"):
        compile_archive.load(tmp_path / "none")
    (tmp_path / "text").write_text("text")
    with pytest.raises(SpeedKitError, match="no archive of SpeedKit's"):
        compile_archive.load(tmp_path / "text")


# Writes files of one letter, over and over, under names that another process writes too.
WRITER = """
import sys
from pathlib import Path
from speedkit_jupyter.machines import compile_cache
while True:
    for name in "abc":
        compile_cache.write(Path(sys.argv[1]) / name, name.encode() * 200_000)
    print("all are there", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills as POSIX does")
def test_two_kernels_at_once_that_are_killed_while_they_write_leave_whole_files(tmp_path) -> None:
    folder = tmp_path / compile_cache.BUNDLES
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    time.sleep(0.2)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    whole = {path.name: path.read_bytes() for path in folder.glob("[abc]")}
    assert whole == {name: name.encode() * 200_000 for name in "abc"}
    assert compile_cache.prune([tmp_path], 0)[0] >= 3  # what they left half written goes, too
