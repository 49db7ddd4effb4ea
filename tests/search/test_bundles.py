"""The compiled code of a learned plan: kept when it is proven, loaded when it is applied."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile

import pytest
import torch

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.search import bundles

# Its code is collected in one process, and the cache emptied before another one loads it.
PROGRAM = """
import shutil, sys, torch
from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search import bundles
from torch._dynamo.utils import counters
import json
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.rand(4, 8)
def step():
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
config = SpeedConfig(compile=True).alone()
if sys.argv[1] == "keep":
    bundle = bundles.collect(step_of(step, model, optimizer), config, 9.0)
    print(json.dumps(bundle))
else:
    shutil.rmtree(compile_cache.place() / compile_cache.COMPILED)
    print(bundles.load(json.loads(sys.argv[2])))
    built = set(compile_cache.place().rglob("*.so"))
    with apply_speedups(model, config, optimizer=optimizer)[1]:
        step()
    every = set(compile_cache.place().rglob("*.so")) - built
    sources = {one: one.with_suffix(".cpp").read_text() for one in every}
    # Inductor's trials of the CPU's instructions are no code of the model's.
    print({one for one in every if "_chk_kernel" not in sources[one]} or "set()")
    print(dict(counters["aot_autograd"])["autograd_cache_hit"])
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    for name in compile_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_bundle_is_all_that_another_process_needs(monkeypatch) -> None:
    (bundle,) = run(monkeypatch, "keep")
    line, built, hits = run(monkeypatch, "load", bundle)
    assert line.startswith("Its compiled code is loaded: the first step took 9 s cold, and ")
    assert (built, hits) == ("set()", "1")


def made(content: bytes = b"code") -> dict:
    """The manifest of a bundle with this content, which lies in its place."""
    folder, checksum = compile_cache.prepare(), hashlib.sha256(content).hexdigest()
    assert folder is not None
    compile_cache.write(folder / compile_cache.BUNDLES / checksum, content)
    times = {"cold_s": 9.0, "warm_s": 1.0}
    return {"checksum": checksum, "machine": compile_cache.machine(), **times}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch was given to load."""
    given: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", given.append)
    return given


def test_a_bundle_that_was_changed_is_refused(loaded) -> None:
    bundle = made()
    path = compile_cache.place() / compile_cache.BUNDLES / bundle["checksum"]
    path.write_bytes(b"cod3")
    assert "was changed since it was kept and is not loaded" in bundles.load(bundle)
    assert loaded == []


def test_a_bundle_that_was_damaged_before_it_was_kept_is_a_line(loaded) -> None:
    assert "can't be loaded (BadZipFile" in bundles.load(made(b"code"))
    assert loaded == []


def test_a_bundle_of_another_machine_is_refused(loaded) -> None:
    bundle = made()
    bundle["machine"] = {**bundle["machine"], "torch": "1.0"}
    assert "of another machine, torch or compiler" in bundles.load(bundle)
    assert loaded == []


def test_a_manifest_can_name_no_file_elsewhere(loaded, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for checksum in (str(tmp_path / "file"), "../../file", None):
        assert "no valid checksum" in bundles.load({**made(), "checksum": checksum})
    assert loaded == []


def test_a_bundle_in_a_folder_that_others_can_write_to_is_refused(loaded) -> None:
    bundle = made()
    compile_cache.place().chmod(0o777)
    compile_cache._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="none is loaded: others can write to"):
        assert bundles.load(bundle) == ""
    assert loaded == []


def test_a_bundle_that_is_gone_is_a_line(loaded) -> None:
    assert "is gone" in bundles.load({**made(), "checksum": "0" * 64})
    assert loaded == []


def test_libraries_are_written_inside_the_cache_alone(loaded, monkeypatch) -> None:
    monkeypatch.delenv(compile_cache.FOLDER, raising=False)
    content, names = io.BytesIO(), ("ab/cab.main.so", "../../evil.so", "ab/../../evil.so", "/x.so")
    with zipfile.ZipFile(content, "w") as packed:
        packed.writestr(bundles.ARTIFACTS, b"artifacts")
        for name in names:
            packed.writestr(name, b"library")
    bundles.load(made(content.getvalue()))
    root = compile_cache.root().parent
    written = [path.relative_to(root).parts[2:] for path in root.rglob("*.so")]
    assert [one for one in written if one != (compile_cache.TRIAL,)] == [
        (compile_cache.COMPILED, "ab", "cab.main.so")
    ]
    assert loaded == [b"artifacts"]
