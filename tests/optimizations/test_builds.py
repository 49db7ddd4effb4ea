"""What a killed compiler left in a cache that other processes use too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speedkit_jupyter.optimizations.compiling.compiled_calls import forget_broken_builds


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty Inductor cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def library(cache: Path, key: str, finished: bool) -> Path:
    """A library as Inductor's builder leaves it, its scratch folder beside it until it is done."""
    folder = cache / key[1:3]
    folder.mkdir()
    (folder / f"{key}.main.so").write_bytes(b"half")
    if not finished:
        (folder / f"{key}.main_CxxBuild").mkdir()
    return folder / f"{key}.main.so"


def test_a_library_that_nobody_finished_is_deleted_and_no_other(cache):
    start = time.time()
    broken, whole = library(cache, "cbroken", False), library(cache, "cwhole", True)
    old = library(cache, "cold", False)
    os.utime(old, (start - 3600, start - 3600))
    forget_broken_builds(start)
    assert [one.exists() for one in (broken, whole, old)] == [False, True, True]


BUILDING = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("building", flush=True)
    sys.stdin.read()
"""


def test_a_library_that_another_process_is_building_stays(cache):
    start = time.time()
    theirs = library(cache, "ctheirs", False)
    (cache / "locks").mkdir()
    command = [sys.executable, "-c", BUILDING, str(cache / "locks" / "ctheirs.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == b"building"
        forget_broken_builds(start)
        assert theirs.exists()
        other.send_signal(signal.SIGKILL)
    forget_broken_builds(start)
    assert not theirs.exists()


def test_what_a_real_build_leaves_when_its_compiler_is_killed_is_found(cache, tmp_path_factory):
    from torch._inductor.cpp_builder import CppBuilder, CppOptions
    from torch._inductor.exc import CppCompileError

    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\necho half > "$2"\nkill -INT $$\n'
    )
    compiler.chmod(0o755)
    folder = cache / "ab"
    folder.mkdir()
    (folder / "cabc.main.cpp").write_text("int one() { return 1; }")
    options = CppOptions(compiler=str(compiler))
    source = str(folder / "cabc.main.cpp")
    builder = CppBuilder("cabc.main", source, options, str(folder))
    start = time.time()
    with pytest.raises((CppCompileError, KeyboardInterrupt)):
        builder.build()
    left = Path(builder.get_target_file_path())
    assert left.exists()
    forget_broken_builds(start)
    assert not left.exists()
