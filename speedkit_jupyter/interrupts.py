"""Ctrl-C, the notebook's stop button and other threads held back while state is half changed."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

# State at module level, on purpose: one process, one thread at a time that applies or restores.
_LOCK = threading.RLock()
_DEPTH = [0]
_LATER: deque[Callable[[], object]] = deque()
# More interrupts in a row than anybody sends; then what raises them is not a person.
MOST_IN_A_ROW = 100
# Signals that follow the first one by less than this are the same wish; the wait for them, once
# all is undone, is shorter, and ends where none comes for so long.
SAME_WISH_S, QUIET_S = 1.0, 0.05
# Who goes on pressing for so long is heard wherever that is.
MOST_HELD_S = 10.0
Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def held_back() -> Iterator[None]:
    """Deliver a SIGINT that arrives inside the block to its own handler after the block.

    Nested blocks deliver it after the outermost one. Python runs signal handlers in the main
    thread only, so in another thread, or under a handler that is not Python's, nothing is done.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(handler) or isinstance(handler, _Held):
        yield
        return
    held = _Held(handler)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held.handler)
        if held.caught and callable(held.handler):
            held.handler(*held.caught[0])


def handler_of(number: int) -> Any:
    """A signal's handler; where it is held back, the one that gets it afterwards."""
    handler = signal.getsignal(number)
    return handler.handler if isinstance(handler, _Held) else handler


def set_handler(number: int, handler: Any) -> None:
    """Raises what `signal.signal` raises; where the signal is held back, from then on."""
    held = signal.getsignal(number)
    if isinstance(held, _Held):
        held.handler = handler
    else:
        signal.signal(number, handler)


def one_in_a_row(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Of interrupts in a row (Ctrl-C pressed twice) the function sees one, and so does its caller.

    The others would meet what is being undone. Who presses again a second later is heard again.
    """
    return _with_a_handler(function, is_open=True)


def in_windows(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same, and that one arrives in the user's own code only: where a `window()` is open.

    In ours it waits for the next window, or for the end.
    """
    return _with_a_handler(function, is_open=False)


def window() -> Window | None:
    """Where interrupts may arrive: to be opened before the user's code and closed after it.

    None where they may anyway.
    """
    return _WINDOWS[0] if _WINDOWS and _WINDOWS[0].thread == threading.get_ident() else None


def _with_a_handler(function: Callable[Given, Result], is_open: bool) -> Callable[Given, Result]:
    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        __tracebackhide__ = True
        handler = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or not callable(handler) or isinstance(handler, _Held | Window):
            return function(*args, **kwargs)
        ours = Window(handler, is_open)
        try:  # no `with` statement, whose own end an interrupt may meet
            try:
                ours.begin()
                return function(*args, **kwargs)
            finally:
                ours.end()
        except KeyboardInterrupt:  # it may have come where it ended
            ours.end()
            raise

    return call


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither an interrupt nor another thread of ours in between: both wait for the end."""
    with held_back():
        try:
            with _LOCK:
                _DEPTH[0] += 1
                try:
                    yield
                finally:
                    _DEPTH[0] -= 1
        finally:
            _run_what_waits()


def finished(action: Callable[[], object]) -> None:
    """Run `action` undisturbed to its end, whatever interrupts come; one of them goes on after it.

    One that comes before it can be held back has `action` start anew, which it must bear.
    """
    interrupt: KeyboardInterrupt | None = None
    for _ in range(MOST_IN_A_ROW):
        try:
            with undisturbed():
                action()
            break
        except KeyboardInterrupt as one:
            interrupt = one
    if interrupt is not None:
        raise interrupt


def soon(action: Callable[[], object]) -> None:
    """Run `action` now or, where state is half changed just now, once it is whole.

    For what the garbage collector sets off, which may be anywhere.
    """
    _LATER.append(action)
    _run_what_waits()


def _run_what_waits() -> None:
    while _LATER and _LOCK.acquire(blocking=False):  # who has it comes here when done
        try:
            if _DEPTH[0]:  # this very thread is in the middle of it
                return
            with held_back():
                _DEPTH[0] += 1
                try:
                    _LATER.popleft()()
                finally:
                    _DEPTH[0] -= 1
        finally:
            _LOCK.release()


class _Held:
    """A handler that keeps what arrives for another."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.caught: list[tuple[int, Any]] = []

    def __call__(self, number: int, frame: Any) -> None:
        self.caught.append((number, frame))


class Window:
    """A handler that passes the first signal of a row on to `handler`, once it is open for it."""

    def __init__(self, handler: Callable[[int, Any], object], is_open: bool) -> None:
        self.thread = threading.get_ident()
        self._handler, self._is_open = handler, is_open
        self._first_s = self._last_s = -math.inf
        self._waits = self._passed = False

    def begin(self) -> None:
        """In place of the handler."""
        signal.signal(signal.SIGINT, self)
        if not self._is_open:
            _WINDOWS.append(self)

    def __call__(self, number: int, frame: Any) -> None:
        now_s = time.monotonic()
        is_same_wish = self._passed and now_s - self._last_s < SAME_WISH_S
        is_late = self._waits and now_s - self._first_s > MOST_HELD_S
        self._first_s = self._first_s if self._waits else now_s
        self._last_s, self._waits = now_s, True
        if (self._is_open and not is_same_wish) or is_late:
            self._pass(number, frame)

    def open(self) -> None:
        """From here on the code is the user's; what waits arrives here."""
        self._is_open, self._passed = True, False  # one that was passed before was swallowed
        if self._waits:
            self._is_open = False
            self._pass(signal.SIGINT, None)

    def close(self) -> None:
        """From here on the code is ours."""
        self._is_open = False

    def end(self) -> None:
        """Put the handler back, once no more of the row is to be expected; what waits arrives."""
        if self in _WINDOWS:
            _WINDOWS.remove(self)
        present: Any = signal.getsignal(signal.SIGINT)
        if present is not self:
            return
        while time.monotonic() - self._last_s < QUIET_S:
            time.sleep(QUIET_S / 10)
        signal.signal(signal.SIGINT, self._handler)
        if self._waits and not self._passed:
            self._pass(signal.SIGINT, None)

    def _pass(self, number: int, frame: Any) -> None:
        self._waits, self._passed = False, True
        self._handler(number, frame)


# State at module level, on purpose: the process has one handler of this signal.
_WINDOWS: list[Window] = []
