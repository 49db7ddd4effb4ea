"""Ctrl-C (and the notebook's stop button) held back while state is half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    held = _Held()
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held.caught:
            handler(*held.caught[0])


class _Held:
    """A handler that keeps what arrives."""

    def __init__(self) -> None:
        self.caught: list[tuple[int, Any]] = []

    def __call__(self, number: int, frame: Any) -> None:
        self.caught.append((number, frame))
