"""A clock for tests: only its readers and `sleep` move it, so that no noise decides anything."""

import functools
import importlib
import inspect
import pkgutil
import sys
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest


class MadeTime:
    """Seconds that pass by being read: one step between two readings takes `tick_s`.

    A step that sleeps on it reaches it: the time lies where no benchmark puts it back.
    """

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self._now: SimpleQueue[float] = SimpleQueue()
        self._now.put(0.0)

    def perf_counter(self) -> float:
        """Seconds. It must go on where nothing sleeps, or budgets would never end."""
        return self._passed(self.tick_s)

    def now_s(self) -> float:
        """Without making it pass."""
        return self._passed(0.0)

    def sleep(self, seconds: float) -> None:
        """At once, and later by so much."""
        self._passed(seconds)

    def _passed(self, seconds: float) -> float:
        now = self._now.get() + seconds
        self._now.put(now)
        return now


def installed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tick_s: float
) -> MadeTime | None:
    """Install the engine's clock; return None for `real_time` tests that do not name it."""
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
    # Nor are the moments in which other processes hold the cores.
    monkeypatch.setattr(busy_machine, "waited_s", lambda: 0.0)
    monkeypatch.setattr(busy_machine, "taken_by_others_s", lambda: 0.0)
    # The machine's own rates can't be measured with it.
    from speedkit_jupyter.machines import gemm_rates

    monkeypatch.setattr(gemm_rates, "_measure", lambda *given: gemm_rates.GemmRates())
    return made


@functools.cache  # walking over the packages would take each test longer than all else around it
def engine() -> list[ModuleType]:
    """Every module of the engine that reads a clock."""
    found = []
    for name in ("state", "step", "right", "rounds", "search", "extras.auto"):
        package = importlib.import_module(f"speedkit_jupyter.{name}")
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(one.name)
            found.append(module)
    found.append(importlib.import_module("speedkit_jupyter.notebook.panel.background_run"))
    return [one for one in found if getattr(one, "time", None) is sys.modules["time"]]
