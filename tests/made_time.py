"""A simulated clock for tests. Only readings and `sleep` advance it, so times have no noise."""

import functools
import importlib
import inspect
import pkgutil
import sys
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest


class MadeTime:
    """A simulated clock; each reading advances it by `tick_s` seconds.

    The time is in a queue, because a benchmark restores most other objects that a step changes.
    """

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self._now: SimpleQueue[float] = SimpleQueue()
        self._now.put(0.0)

    def perf_counter(self) -> float:
        """Advance the clock and return its seconds, so that budgets end even if nothing sleeps."""
        return self._passed(self.tick_s)

    def now_s(self) -> float:
        """Return the time in seconds without advancing the clock."""
        return self._passed(0.0)

    def sleep(self, seconds: float) -> None:
        """Advance the clock by `seconds` and return at once."""
        self._passed(seconds)

    def _passed(self, seconds: float) -> float:
        now = self._now.get() + seconds
        self._now.put(now)
        return now


def installed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tick_s: float
) -> MadeTime | None:
    """Install the simulated clock, except for `real_time` tests that don't request `made_time`."""
    is_asked = "made_time" in inspect.signature(request.function).parameters
    if request.node.get_closest_marker("real_time") and not is_asked:
        return None
    return install(monkeypatch, tick_s)


def install(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> MadeTime:
    from speedkit_jupyter.rounds import busy_machine

    made = MadeTime(tick_s)
    names = ("perf_counter", "process_time", "monotonic")
    clock = SimpleNamespace(**dict.fromkeys(names, made.perf_counter))
    for module in engine():
        monkeypatch.setattr(module, "time", clock)
    # Other processes delay nothing on this clock.
    monkeypatch.setattr(busy_machine, "waited_s", lambda: 0.0)
    monkeypatch.setattr(busy_machine, "taken_by_others_s", lambda: 0.0)
    # The machine's matrix-multiply rates can't be measured with this clock.
    from speedkit_jupyter.machines import gemm_rates

    monkeypatch.setattr(gemm_rates, "_measure", lambda *given: gemm_rates.GemmRates())
    return made


@functools.cache  # walking the packages would take most of the time of a test
def engine() -> list[ModuleType]:
    """Return the modules that measure, search or run in the background and import `time`."""
    found = []
    for name in ("state", "step", "right", "rounds", "search", "extras.auto"):
        package = importlib.import_module(f"speedkit_jupyter.{name}")
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found.append(importlib.import_module(one.name))
    found.append(importlib.import_module("speedkit_jupyter.notebook.panel.background_run"))
    return [one for one in found if getattr(one, "time", None) is sys.modules["time"]]
