"""Searches on steps whose speed is made: on a clock of their own, so that no noise decides."""

from __future__ import annotations

import pytest
from made_time import MadeTime, install


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch) -> MadeTime:
    """The clock of the engine and of the search; what takes long is what sleeps on it."""
    return install(monkeypatch, tick_s=1e-5)


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Small models, beside other test processes."""


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are the machine's own affair, and compiling takes long: neither is tried here."""
    from speedkit_jupyter.optimizations.compile import Compile
    from speedkit_jupyter.optimizations.threads import Threads

    for optimization in (Compile, Threads):
        monkeypatch.setattr(optimization, "candidates", lambda self, hardware, facts: ())
