"""Profiles of steps whose speed is made, on a clock of their own: the right split is known."""

import pytest
from made_time import MadeTime, installed

from speedkit_jupyter.extras.profile import profiler


@pytest.fixture
def made_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MadeTime | None:
    """The clock of the engine; what takes long is what sleeps on it."""
    return installed(request, monkeypatch, tick_s=1e-6)


@pytest.fixture(autouse=True)
def a_few_samples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are sampled by the real clock: not for long, where they are not what it is about."""
    if request.path.name != "test_lines.py":
        monkeypatch.setattr(profiler, "ENOUGH_S", 0.005)
