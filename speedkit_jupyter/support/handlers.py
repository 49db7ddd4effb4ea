"""What stands in the place of every signal's handler for a while, and how that ends."""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import cache
from typing import Any

# More interrupts in a row than anybody sends; then what raises them is not a person.
MOST_IN_A_ROW = 100
# Signals that follow the first one by less than this are the same wish; the wait for them, once
# all is undone, is shorter, and ends where none comes for so long.
SAME_WISH_S, QUIET_S = 1.0, 0.05
# Who goes on pressing for so long is heard wherever that is.
MOST_HELD_S = 10.0


class InPlace(ABC):
    """Gets the signals that handlers written in Python would: those handlers may raise.

    A time-out (SIGALRM) does so anywhere, as Ctrl-C (SIGINT) does.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.holds = False  # else it was left behind by interrupts in a row, and is in nobody's way

    @abstractmethod
    def __call__(self, number: int, frame: Any) -> None:
        """A signal has come."""

    def begin(self) -> None:
        """In place of all the handlers. What one raises goes on once all are back."""
        try:
            for number in _numbers():
                handler = own(signal.getsignal(number), number)
                if callable(handler):
                    self.instead_of(number, handler)
            self.holds = True
        except BaseException:
            self.put_back()
            raise

    def instead_of(self, number: int, handler: Any) -> None:
        """In place of one."""
        self.handlers[number] = handler
        signal.signal(number, self)

    def put_back(self) -> None:
        """All that are still exchanged; what they raise meanwhile goes on after it."""
        raised: BaseException | None = None
        for _ in range(MOST_IN_A_ROW):
            try:
                for number, handler in self.handlers.items():
                    if signal.getsignal(number) is self:
                        signal.signal(number, handler)
                break
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised


class Held(InPlace):
    """Keeps the first signal of each number for its handler."""

    def __init__(self) -> None:
        super().__init__()
        self._caught: dict[int, Any] = {}

    def __call__(self, number: int, frame: Any) -> None:
        """For later."""
        if self.holds:
            self._caught.setdefault(number, frame)
        else:
            deliver(self.handlers, {number: frame})

    def end(self) -> None:
        """What was kept arrives."""
        try:
            self.put_back()
        finally:
            self.holds = False
            deliver(self.handlers, self._caught)


class Window(InPlace):
    """Passes the first signal of a row on to its handler, once it is open for it.

    A row begins with Ctrl-C, or with another signal whose handler raises.
    """

    def __init__(self, is_open: bool) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.is_always_open, self._is_open = is_open, is_open
        self._first_s = self._last_s = -math.inf
        self._waiting: dict[int, None] = {}
        self._passed: int | None = None  # the signal that the row began with

    def begin(self) -> None:
        """In place of the handlers."""
        super().begin()
        WINDOWS.append(self)

    def __call__(self, number: int, frame: Any) -> None:
        __tracebackhide__ = True
        now_s = time.monotonic()
        is_in_a_row = self._passed is not None and now_s - self._last_s < SAME_WISH_S
        is_late = bool(self._waiting) and now_s - self._first_s > MOST_HELD_S
        self._first_s = self._first_s if self._waiting else now_s
        self._last_s = now_s if number == signal.SIGINT else self._last_s
        self._waiting[number] = None
        if (self._is_open and not is_in_a_row) or is_late or not self.holds:
            self._pass(number, frame)

    def open(self) -> None:
        """From here on the code is the user's; what waits arrives here."""
        __tracebackhide__ = True
        self._is_open, self._passed = False, None  # one that was passed before was swallowed
        for number in [*self._waiting]:
            self._pass(number, None)
        self._is_open = True

    def close(self) -> None:
        """From here on the code is ours."""
        self._is_open = False

    def end(self) -> None:
        """Put the handlers back, once no more of the row is to be expected; what waits arrives."""
        if self in WINDOWS:
            WINDOWS.remove(self)
        while time.monotonic() - self._last_s < QUIET_S:
            time.sleep(QUIET_S / 10)
        try:
            self.put_back()
        finally:
            self.holds = False
            waiting, self._waiting = self._waiting, {}
            deliver(self.handlers, {number: None for number in waiting if number != self._passed})

    def _pass(self, number: int, frame: Any) -> None:
        __tracebackhide__ = True
        self._waiting.pop(number, None)
        self._passed = number if number == signal.SIGINT else self._passed
        try:
            self.handlers[number](number, frame)
        except BaseException:
            self._passed, self._last_s = number, time.monotonic()
            raise


def deliver(handlers: dict[int, Any], caught: dict[int, Any]) -> None:
    """Each to its handler, whatever another one raises."""
    with ExitStack() as all_of_them:
        for number, frame in reversed(caught.items()):
            handler = handlers.get(number)
            if callable(handler):
                all_of_them.callback(handler, number, frame)


def own(handler: Any, number: int) -> Any:
    """The user's handler behind one that holds signals back."""
    while isinstance(handler, Held):
        handler = handler.handlers[number]
    return handler


def can_be_exchanged() -> bool:
    """Python runs the handlers of signals in the main thread only."""
    return threading.current_thread() is threading.main_thread()


@cache
def _numbers() -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in signal.valid_signals()))


# State at module level, on purpose: the process has one handler of each signal.
WINDOWS: list[Window] = []
