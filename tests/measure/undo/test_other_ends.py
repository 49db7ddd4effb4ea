"""What has another end, a process or a pipe, is named before a step runs; a file is not."""

# ruff: noqa: SIM115

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import select
import signal
import smtplib
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import StateWarning
from speedkit_jupyter.measure.undo.kinds.code.spelled import Words

CALLS = [
    (lambda: subprocess.run(["true"]), "subprocess.run"),
    (lambda: subprocess.check_output(["true"]), "subprocess.check_output"),
    (lambda: subprocess.Popen(["true"]), "Popen"),
    (lambda: os.popen("true").read(), "os.popen"),
    (lambda: os.system("true"), "system"),
    (lambda pid: os.kill(pid, signal.SIGTERM), "os.kill"),
    (lambda: signal.raise_signal(signal.SIGUSR1), "signal.raise_signal"),
    (lambda: socket.create_connection(("localhost", 1)), "socket.create_connection"),
    (lambda number: os.read(number, 1), "os.read"),
    (lambda number: os.readv(number, [bytearray(1)]), "os.readv"),
    (lambda number: os.write(number, b"x"), "os.write"),
    (lambda number: os.set_blocking(number, False), "os.set_blocking"),
]
HARMLESS = [
    lambda: os.read(os.open("file", os.O_RDONLY), 1),
    lambda stream, runner: (stream.read(), runner.run(), runner.call(), runner.kill()),
    lambda frame: (frame.write(3), os.getpid(), signal.SIGTERM),
]


@pytest.mark.parametrize(("function", "name"), CALLS, ids=[name for _, name in CALLS])
def test_a_call_that_reaches_another_process_is_named(function, name):
    assert Words([function]).leaves([function], [function]) == [name]


@pytest.mark.parametrize("function", HARMLESS)
def test_others_are_not(function):
    assert Words([function]).leaves([function], [function]) == []


def before(step: Any) -> list[str]:
    """The lines before a step runs; it does not run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with step_of(step).isolated():
            return [str(one.message) for one in caught]


def a_process() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)


def a_stream() -> asyncio.StreamReader:
    return asyncio.StreamReader(loop=asyncio.new_event_loop())


HANDLES = {
    "a process": (a_process, lambda o: (o.communicate(), o.wait())),
    "a process of multiprocessing": (lambda: multiprocessing.Process(target=print), lambda o: None),
    "the output of a command": (lambda: os.popen("true"), lambda o: o.close()),
    "a socket": (lambda: socket.socket(), lambda o: o.close()),
    "a pipe of multiprocessing": (lambda: multiprocessing.Pipe()[0], lambda o: o.close()),
    "a file of a pipe": (lambda: open(os.pipe()[0], "rb"), lambda o: o.close()),
    "a connection": (lambda: http.client.HTTPConnection("localhost"), lambda o: o.close()),
    "a mail server": (lambda: smtplib.SMTP(), lambda o: o.close()),
    "a poll": (lambda: select.poll(), lambda o: None),
    "a stream": (a_stream, lambda o: o._loop.close()),
}  # fmt: skip


@pytest.mark.parametrize("where", ["a variable", "an attribute", "a list"])
@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_is_named_wherever_it_is_held(kind, where):
    make, end = HANDLES[kind]
    handle = make()
    holder, row = SimpleNamespace(handle=handle), [handle]
    steps = {
        "a variable": lambda: handle.fileno(),
        "an attribute": lambda: holder.handle.fileno(),
        "a list": lambda: row[0].fileno(),
    }
    try:
        lines = [line for line in before(steps[where]) if "can't be put back" in line]
        assert lines, "nothing is named"
        assert any(word in line for line in lines for word in ("handle", "holder", "row[0]")), lines
    finally:
        end(handle)


@pytest.mark.parametrize("where", ["a variable", "an attribute", "a list"])
def test_reading_from_a_pipe_is_named_and_reading_a_file_is_put_back(tmp_path, where):
    (tmp_path / "file").write_bytes(b"abc")
    pipe = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for number, expected in ((pipe[0], True), (file, False)):
            holder, row = SimpleNamespace(number=number), [number]
            steps = {
                "a variable": lambda number=number: os.read(number, 1),
                "an attribute": lambda holder=holder: os.read(holder.number, 1),
                "a list": lambda row=row: os.read(row[0], 1),
            }
            said = [line for line in before(steps[where]) if line.startswith("os.read is called")]
            assert bool(said) == expected
    finally:
        for number in (*pipe, file):
            os.close(number)
