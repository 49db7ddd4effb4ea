"""Ctrl-C, other signals and other threads held back while state is half changed."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from speedkit_jupyter.support.handlers import (
    MOST_IN_A_ROW,
    WINDOWS,
    Held,
    Window,
    can_be_exchanged,
    own,
)

# State at module level, on purpose: one process, one thread at a time that applies or restores.
_LOCK = threading.RLock()
_DEPTH = [0]
_LATER: deque[Callable[[], object]] = deque()
Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def held_back() -> Iterator[None]:
    """Deliver signals that arrive inside the block to their own handlers after the block.

    Nested blocks deliver them after the outermost one. Python runs signal handlers in the main
    thread only, so in another thread, or under a handler that is not Python's, nothing is done.
    """
    if _HOLDING or not can_be_exchanged():
        yield
        return
    held = Held()
    held.begin()
    _HOLDING.append(held)
    try:
        yield
    finally:
        _HOLDING.remove(held)
        held.end()


def handler_of(number: int) -> Any:
    """A signal's handler; where it is held back, the one that gets it afterwards."""
    return own(signal.getsignal(number), number)


def set_handler(number: int, handler: Any) -> None:
    """Raises what `signal.signal` raises; where signals are held back, from then on."""
    if _HOLDING and callable(handler) and can_be_exchanged():
        _HOLDING[0].instead_of(number, handler)
    else:
        signal.signal(number, handler)
        if _HOLDING:
            _HOLDING[0].handlers.pop(number, None)


def one_in_a_row(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Of interrupts in a row (Ctrl-C pressed twice) the function sees one, and so does its caller.

    The others would meet what is being undone. Who presses again a second later is heard again.
    What another signal's handler raises counts as one: a time-out.
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
    first = WINDOWS[0] if WINDOWS else None
    is_ours = first is not None and first.thread == threading.get_ident()
    return first if is_ours and first is not None and not first.is_always_open else None


def in_a_window(function: Callable[[], Result]) -> Result:
    """Call the user's code; what waits for a window may arrive in it."""
    __tracebackhide__ = True
    first = window()
    if first is None:
        return function()
    first.open()
    try:
        return function()
    finally:
        first.close()


def _with_a_handler(function: Callable[Given, Result], is_open: bool) -> Callable[Given, Result]:
    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        __tracebackhide__ = True
        if WINDOWS or _HOLDING or not can_be_exchanged():
            return function(*args, **kwargs)
        ours = Window(is_open)
        try:  # no `with` statement, whose own end an interrupt may meet
            try:
                ours.begin()
                return function(*args, **kwargs)
            finally:
                ours.end()
        except BaseException:  # it may have come where it ended
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

    One that comes before it can be held back has `action` start anew, which it must bear. So does
    what any signal's handler raises; what `action` itself raises goes on.
    """
    interrupt: BaseException | None = None
    for _ in range(MOST_IN_A_ROW):
        run = _Run(action)
        try:
            with undisturbed():
                run.to_its_end()
        except BaseException as error:
            interrupt = error
        if run.ended:
            break
    if interrupt is not None:
        raise interrupt


class _Run:
    """Whether an action has come to its end, be it a failure of its own."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action, self.ended = action, False

    def to_its_end(self) -> None:
        try:
            self._action()
        finally:
            self.ended = True


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


# State at module level, on purpose: the process has one handler of each signal.
_HOLDING: list[Held] = []
