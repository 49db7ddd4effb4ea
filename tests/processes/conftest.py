"""One set of two workers for all tests; nothing of it is left."""

from __future__ import annotations

import os

import psutil
import pytest

from speedkit_jupyter.processes import workers


@pytest.fixture(scope="session", autouse=True)
def _stopped():
    yield
    running = workers.current()
    workers.stop()
    assert psutil.Process().children(recursive=True) == []
    assert running is None or not os.path.exists(running._folder)
