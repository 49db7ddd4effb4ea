"""What a cell prints and logs while it is measured: of hundreds of steps that of the first."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from typing import Any


class CellOutput:
    """`begun` once the first step has run; from then on nothing is shown.

    Other threads print and log where they did before.
    """

    def __init__(self) -> None:
        self._silence = _Silence(sys.stdout)

    def begun(self) -> None:
        """The first step of all has ended."""
        self._silence.stream = None

    @contextmanager
    def once(self) -> Iterator[None]:
        """For a block of steps: what they print and log is dropped, but for the first of all."""
        if self._silence.stream is not None:
            self._silence.stream = sys.stdout
        handlers = list(_printing_handlers())
        streams = [_InThisThread(self._silence, stream) for stream in (sys.stdout, sys.stderr)]
        heeds = _Heeds(self._silence)
        with ExitStack() as stack:
            for handler in handlers:
                stack.callback(handler.removeFilter, heeds)
                handler.addFilter(heeds)
            stack.enter_context(redirect_stdout(streams[0]))
            stack.enter_context(redirect_stderr(streams[1]))
            yield


@contextmanager
def streams_kept() -> Iterator[None]:
    """Whatever an interrupt keeps from being undone inside: what is printed after it is shown."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Silence(TextIOBase):
    """Takes what is printed: on to `stream` while there is one, then nowhere."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if self.stream is not None:
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()


class _InThisThread(TextIOBase):
    """Takes the place of a stream for the thread that made it; others write on to `found`."""

    def __init__(self, ours: TextIOBase, found: Any) -> None:
        self._ours, self._found, self._thread = ours, found, threading.get_ident()

    def _stream(self) -> Any:
        return self._ours if threading.get_ident() == self._thread else self._found

    def write(self, text: str) -> int:
        return int(self._stream().write(text))

    def flush(self) -> None:
        self._stream().flush()


class _Heeds(logging.Filter):
    """Lets a handler that has a stream of before say no more than the silence does."""

    def __init__(self, silence: _Silence) -> None:
        super().__init__()
        self._silence, self._thread = silence, threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._silence.stream is not None or threading.get_ident() != self._thread


def _printing_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Handlers that took the notebook's stdout or stderr when they were made, as libraries' do."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and any(
                getattr(handler, "stream", None) is stream for stream in streams
            ):
                yield handler
