"""Fixtures that give workers more time and check that they leave no process or folder."""

import contextlib
import os

import psutil
import pytest

from speedkit_jupyter.extras.processes import workers


def left() -> list[str]:
    """Return the commands of ipyparallel's processes that still run after a minute."""
    commands = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            commands[process] = " ".join(process.cmdline())
    ours = [process for process, command in commands.items() if "ipyparallel" in command]
    return [commands[process] for process in psutil.wait_procs(ours, timeout=60)[1]]


@pytest.fixture(scope="session")
def left_processes():
    return left


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Wait longer, so that ranks can stop by themselves on a busy machine."""
    monkeypatch.setattr(workers, "INTERRUPT_S", 8.0)
    monkeypatch.setattr(workers, "OUTPUT_S", 120.0)


@pytest.fixture(scope="session", autouse=True)
def _stopped():
    yield
    running = workers.current()
    workers.stop()
    assert left() == []
    assert running is None or not os.path.exists(running.folder)
