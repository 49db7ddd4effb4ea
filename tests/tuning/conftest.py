"""Searches on steps whose speed is made: on a clock of their own, so that no noise decides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from made_time import MadeTime, install


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch) -> MadeTime:
    """The clock of the engine and of the search; what takes long is what sleeps on it."""
    return install(monkeypatch, tick_s=1e-5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For thousands of tiny steps: two threads would mostly wait for one another."""
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(found)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are the machine's own affair, and compiling takes long: neither is tried here."""
    from speedkit_jupyter.optimizations.compile import Compile
    from speedkit_jupyter.optimizations.threads import Threads

    for optimization in (Compile, Threads):
        monkeypatch.setattr(optimization, "candidates", lambda self, hardware, facts: ())
