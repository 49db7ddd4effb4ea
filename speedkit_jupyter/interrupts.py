"""Ctrl-C, the notebook's stop button and other threads held back while state is half changed."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# State at module level, on purpose: one process, one thread at a time that applies or restores.
_LOCK = threading.RLock()
_DEPTH = [0]
_LATER: deque[Callable[[], object]] = deque()
# More interrupts in a row than anybody sends; then what raises them is not a person.
MOST_IN_A_ROW = 100


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
