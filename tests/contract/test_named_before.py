"""Test docs/contract.md, "Named before the run": warnings name state that can't be restored."""

import functools
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter import StateWarning, benchmark


def named(extra: Callable[[], object]) -> str:
    """Measure a training step that also calls `extra`; return the lines of its StateWarnings."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        extra()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        benchmark(step, ["baseline", "bf16"], budget_s=0.2)
    found = [one for one in caught if one.category is StateWarning]
    assert {one.filename for one in found} <= {__file__}  # the line that began the measurement
    return "\n".join(str(one.message) for one in found)


def appended(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("x")


def in_a_thread(_: Path) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


LOG: list[Path] = []
ACTS = {
    "a file, written": (lambda file: file.write_text("x"), "file"),
    "a file, saved by torch": (lambda file: torch.save({}, file), "file"),
    "a file, appended to": (appended, "file"),
    "a file, read": (Path.read_text, ""),
    "a process": (lambda _: subprocess.run([sys.executable, "-c", ""], check=True), "process"),
    "a thread": (in_a_thread, "thread"),
    "a list": (LOG.append, ""),
    "stderr": (lambda _: print(end="", file=sys.stderr), ""),
    "/dev/null": (lambda _: Path(os.devnull).write_text("x"), ""),
}


@pytest.mark.parametrize("kind", ACTS)
def test_a_step_whose_act_can_not_be_put_back_is_named_and_others_are_silent(kind, tmp_path):
    act, word = ACTS[kind]
    (tmp_path / "file").write_text("1")
    found = named(lambda: act(tmp_path / "file"))
    assert word in found if word else found == ""


def test_a_socket_that_the_step_opens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert "socket" in named(lambda: socket.create_connection(address).close())


def test_a_module_that_the_step_imports_for_the_first_time_is_named(tmp_path, monkeypatch):
    (tmp_path / "of_a_step.py").write_text("log = []")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_step", raising=False)
    assert "imports of_a_step" in named(lambda: __import__("of_a_step").log.append(1))
    del sys.modules["of_a_step"]


def test_an_object_that_cannot_be_copied_is_named() -> None:
    base = sqlite3.connect(":memory:")
    base.execute("create table log (n)")
    assert "base" in named(lambda: base.execute("insert into log values (1)"))
    cached = functools.lru_cache(None)(lambda n: n)
    assert "cached" in named(lambda: cached(1))


def test_an_iterator_that_was_measured_before_is_named_as_before() -> None:
    drawn = (number for number in range(100_000))
    assert "(generator) is drawn from" in named(lambda: next(drawn))
    assert "_tee_dataobject" not in named(lambda: next(drawn))
    net = nn.Linear(1, 1)
    proxy = weakref.proxy(net)
    assert named(lambda: proxy.weight) == ""


def test_naming_can_be_made_an_error_and_then_nothing_runs(tmp_path: Path) -> None:
    model, log = nn.Linear(4, 2), tmp_path / "x"
    with log.open("w") as opened:

        def step() -> None:
            opened.write("x")
            model(torch.ones(1, 4)).sum().backward()

        with warnings.catch_warnings():
            warnings.simplefilter("error", StateWarning)
            with pytest.raises(StateWarning):
                benchmark(step, ["baseline", "bf16"], budget_s=0.2)
    assert log.read_text() == ""
