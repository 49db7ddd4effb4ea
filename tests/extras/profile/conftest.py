"""Fixtures for profiles on a simulated clock, so that tests know the time of each part."""

import pytest
from made_time import MadeTime, installed

from speedkit_jupyter.extras.profile import profiler


@pytest.fixture
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """Install a clock that `sleep` advances; each reading adds only 1 µs."""
    return installed(request, monkeypatch, tick_s=1e-6)


@pytest.fixture(autouse=True)
def a_few_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile few calls, since simulated calls are alike. test_lines.py uses the real clock."""
    if request.path.name != "test_lines.py":
        monkeypatch.setattr(profiler, "ENOUGH_CALLS", 20)
        monkeypatch.setattr(profiler, "ENOUGH_S", 0.0)
