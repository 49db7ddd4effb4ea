"""One set of two workers for all tests; nothing of it is left."""

from __future__ import annotations

import contextlib
import os

import psutil
import pytest

from speedkit_jupyter.processes import workers


def left() -> list[str]:
    """The commands of ipyparallel's processes below this one; torch may have others."""
    commands = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    return [one for one in commands if "ipyparallel" in one]


@pytest.fixture(scope="session")
def left_processes():
    return left


@pytest.fixture(scope="session", autouse=True)
def _stopped():
    yield
    running = workers.current()
    workers.stop()
    assert left() == []
    assert running is None or not os.path.exists(running._folder)
