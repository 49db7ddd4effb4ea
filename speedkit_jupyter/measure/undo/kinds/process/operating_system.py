"""What the operating system keeps for the process: its environment, signals, limits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
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


def _timers() -> dict[int, tuple[float, bool]]:
    """The interval, and whether it runs: how much is left changes by itself."""
    timers = {}
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        left_s, interval_s = signal.getitimer(timer)
        timers[int(timer)] = (interval_s, left_s > 0)
    return timers


def _write_timers(value: dict[int, tuple[float, bool]]) -> None:
    """Those that ran can't run on from where they were."""
    for number, (_, runs) in value.items():
        if not runs:
            signal.setitimer(signal.ITIMER_REAL.__class__(number), 0)


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
