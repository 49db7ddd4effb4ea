"""Profiles of steps whose speed is made, on a clock of their own: the right split is known."""

import pytest
from made_time import MadeTime, installed

from speedkit_jupyter.extras.profile import profiler


@pytest.fixture
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """The clock of the engine; what takes long is what sleeps on it."""
    return installed(request, monkeypatch, tick_s=1e-6)


@pytest.fixture(autouse=True)
def a_few_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a made speed are alike, and lines are sampled by the real clock."""
    if request.path.name != "test_lines.py":
        monkeypatch.setattr(profiler, "ENOUGH_CALLS", 20)
        monkeypatch.setattr(profiler, "ENOUGH_S", 0.0)
