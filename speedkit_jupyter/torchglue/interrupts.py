"""Delay Ctrl-C, other signals and other threads while state is half changed.

Python runs signal handlers between any two instructions of the main thread; handlers may raise.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from speedkit_jupyter.support.tracebacks import hide_internal_frames

P = ParamSpec("P")
R = TypeVar("R")
# After a signal has waited this many seconds, the next one passes: the code may hang.
LONGEST_S = 10.0


class Gate:
    """A handler that replaces Python's signal handlers; it delays signals while it is closed."""

    def __init__(self) -> None:
        self._waiting: dict[int, Any] = {}
        self.thread = threading.get_ident()
        self._handlers: dict[int, Any] = {}
        self._is_open = self._has_passed = False  # _has_passed: a handler runs or has raised
        self._first_s = 0.0

    def __call__(self, number: int, frame: Any) -> None:
        """Pass a signal on if the gate is open or a signal has waited LONGEST_S; else delay it."""
        __tracebackhide__ = True
        if not self._waiting:
            self._first_s = time.monotonic()
        self._waiting[number] = frame
        if self._is_open or time.monotonic() - self._first_s > LONGEST_S:
            self._pass_on()

    def open(self) -> None:
        """Pass on pending signals now, and new signals immediately: the user's code begins."""
        __tracebackhide__ = True
        self._is_open, self._has_passed = True, False
        self._pass_on()

    def close(self) -> None:
        """Delay signals from now on: SpeedKit's code begins."""
        self._is_open = False

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Delay signals within the block; at its end, pass them on if the gate was open before."""
        was_open, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was_open
            if was_open:
                self._pass_on()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace handlers in the block, then restore them. Pass on signals unless one raised."""
        __tracebackhide__ = True
        try:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self)
            _GATES.append(self)  # no signal raises from here on
            yield
        finally:
            _GATES.clear()
            waiting = {} if self._has_passed else self._waiting
            try:
                self._waiting, self._is_open = {}, True  # new signals pass immediately
                self._put_back()
            except BaseException:
                self._put_back()
                raise
            for number, frame in waiting.items():
                self._handlers[number](number, frame)

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)

    def _pass_on(self) -> None:
        __tracebackhide__ = True
        for number in [*self._waiting]:
            frame = self._waiting.pop(number)
            self._is_open, self._has_passed = False, True  # no second Ctrl-C during cleanup
            self._handlers[number](number, frame)
            self._is_open, self._has_passed = True, False  # the handler raised nothing


_NUMBERS = tuple(int(number) for number in signal.valid_signals())
# The gate in place, if any. It is global, because the process has one handler per signal.
_GATES: list[Gate] = []


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay signals in the block until the outermost block ends or the user's code runs."""
    block: AbstractContextManager[None] = nullcontext()
    if threading.current_thread() is threading.main_thread():  # only the main thread runs handlers
        block = _GATES[0].shut() if _GATES else Gate().in_place()
    with block:
        yield


def interruptible_in_users_code(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that signals are delivered only in the user's code, in `in_a_window`.

    Signals during SpeedKit's code wait for the next `in_a_window`, or for the end of the call.
    SpeedKit's frames are removed from errors.
    """

    @hide_internal_frames
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        with nullcontext() if _GATES else interrupts_delayed():
            return function(*args, **kwargs)

    return call


def in_a_window(function: Callable[[], R]) -> R:
    """Call the user's `function` with signals enabled. Deliver pending signals first."""
    __tracebackhide__ = True
    gate = _GATES[0] if _GATES else None
    if gate is None or gate.thread != threading.get_ident():
        return function()
    try:
        gate.open()
        return function()
    finally:
        gate.close()


def is_python_thread() -> bool:
    """Return whether Python code started this thread; False in autograd's GPU threads."""
    known = {thread.ident: thread for thread in threading.enumerate()}.get(threading.get_ident())
    return known is not None and not isinstance(known, threading._DummyThread)


# Only one thread at a time applies or restores plans. Actions of finalizers wait for that thread.
_LOCK = threading.RLock()
_DEPTH = [0]
_LATER: deque[Callable[[], object]] = deque()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals, and let in one thread at a time; at the end, run `run_when_safe` actions."""
    with interrupts_delayed():
        try:
            with _LOCK:
                _DEPTH[0] += 1
                try:
                    yield
                finally:
                    _DEPTH[0] -= 1
        finally:
            _run_waiting()


def run_when_safe(action: Callable[[], object]) -> None:
    """Run `action` now or, if a thread is in an `uninterrupted` block, at the end of that block."""
    _LATER.append(action)
    _run_waiting()


def _run_waiting() -> None:
    while _LATER and _LOCK.acquire(blocking=False):  # else the lock's owner runs the actions
        try:
            if _DEPTH[0]:  # this thread is inside `uninterrupted`
                return
            with uninterrupted():
                _LATER.popleft()()
        finally:
            _LOCK.release()
