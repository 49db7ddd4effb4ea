"""What the operating system keeps for the process: its environment, signals, limits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedkit_jupyter.measure.undo.kinds.settings import Setting, owner_of
from speedkit_jupyter.support import interrupts


def settings() -> Iterator[Setting]:
    """In the order in which they are put back: the time zone follows from the environment."""
    yield Setting("os.environ", os.environ.copy, _write_environment, "environ putenv unsetenv")
    yield Setting("the environment of C", _environment_of_c, _write_environment_of_c, "putenv")
    yield Setting("the time zone", lambda: time.tzname, lambda value: time.tzset())
    yield Setting("the working directory", os.getcwd, os.chdir)
    yield Setting("signal handlers", _handlers, _write_handlers)
    yield Setting("blocked signals", _blocked, _write_blocked)
    yield Setting("timers of signals", _timers, _write_timers)
    yield Setting("the locale", lambda: _locale(None), _locale, "setlocale")
    yield Setting("umask", _umask, os.umask)
    yield Setting("limits of resources", _limits, _write_limits)
    yield Setting(
        "the cores of the process",
        lambda: os.sched_getaffinity(0),
        lambda value: os.sched_setaffinity(0, value),
    )
    yield Setting(
        "the priority of the process",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    )


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    for name, content in value.items():
        if os.environ.get(name) != content:
            os.environ[name] = content


def _environment_of_c() -> dict[bytes, bytes]:
    """What `os.putenv` and libraries set, which `os.environ` does not know."""
    environment = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    values, number = {}, 0
    while line := environment[number]:
        name, _, value = line.partition(b"=")
        values[name] = value
        number += 1
    return values


def _write_environment_of_c(value: dict[bytes, bytes]) -> None:
    now = _environment_of_c()
    for name in now.keys() - value.keys():
        os.unsetenv(name)
    for name, content in value.items():
        if now.get(name) != content:
            os.putenv(name, content)


def _handlers() -> dict[int, Any]:
    return {int(number): interrupts.handler_of(number) for number in signal.valid_signals()}


def _write_handlers(value: dict[int, Any]) -> None:
    """Raises TypeError for one that is not Python's, and ValueError in another thread."""
    now = _handlers()
    for number, handler in value.items():
        if now[number] is not handler and now[number] != handler:
            interrupts.set_handler(number, handler)


def _blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _write_blocked(value: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, value)


@dataclass(frozen=True, eq=False)
class _Timer:
    """How much is left changes by itself: equal are those that both run or do not, but for one that
    rings once and whose time was over meanwhile. `read_s` is of the timer's own clock.
    """

    interval_s: float
    left_s: float
    read_s: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        before, now = sorted((self, other), key=lambda one: one.read_s)
        has_rung = not before.interval_s and 0 < before.left_s <= now.read_s - before.read_s
        same_runs = (before.left_s > 0) == (now.left_s > 0)
        return before.interval_s == now.interval_s and (same_runs or has_rung)


# Each with its clock: real time, that of the process in its own code, and in the system's, too.
TIMERS = {
    "ITIMER_REAL": time.monotonic,
    "ITIMER_VIRTUAL": lambda: os.times().user,
    "ITIMER_PROF": time.process_time,
}


def _timers() -> dict[str, _Timer]:
    timers = {}
    for name, clock in TIMERS.items():
        left_s, interval_s = signal.getitimer(getattr(signal, name))
        timers[name] = _Timer(interval_s, left_s, clock())
    return timers


def _write_timers(value: dict[str, _Timer]) -> None:
    """Those that ran can't run on from where they were."""
    for name, timer in value.items():
        if not timer.left_s:
            signal.setitimer(getattr(signal, name), 0)


def _locale(value: str | None) -> str:
    module = owner_of("locale")
    return str(module.setlocale(module.LC_ALL, value))


def _umask() -> int:
    """Without setting it, not for a moment, where the system tells."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Umask")), 8)
    now = os.umask(0o077)
    os.umask(now)
    return now


def _limits() -> dict[int, tuple[int, int]]:
    resource = owner_of("resource")
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {number: resource.getrlimit(number) for number in {getattr(resource, n) for n in names}}


def _write_limits(value: dict[int, tuple[int, int]]) -> None:
    now = _limits()
    for number, limits in value.items():
        if now[number] != limits:
            owner_of("resource").setrlimit(number, limits)
