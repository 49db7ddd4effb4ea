"""Searches on steps whose speed is made: on a clock of their own, so that no noise decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

# What reading the clock takes: it must go on where nothing sleeps, or budgets would never end.
TICK_S = 1e-5


class MadeTime:
    """A clock that only its readers and `sleep` move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """Seconds."""
        self.now_s += TICK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """At once, and later by so much."""
        self.now_s += seconds


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch) -> MadeTime:
    """The clock of the engine and of the search."""
    from speedkit_jupyter.measure import clock, roofline, sampler
    from speedkit_jupyter.tuning import search

    made = MadeTime()
    for module in (clock, sampler, search):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    # The machine's own rates can't be measured with it.
    monkeypatch.setattr(roofline, "peak", lambda *given: roofline.Peak(1e12, 1e10))
    return made


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are the machine's own affair, and compiling takes long: neither is tried here."""
    from speedkit_jupyter.optimizations.compile import Compile
    from speedkit_jupyter.optimizations.threads import Threads

    for optimization in (Compile, Threads):
        monkeypatch.setattr(optimization, "candidates", lambda self, hardware, facts: ())
