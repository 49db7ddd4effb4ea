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
        self._is_silent = False

    def begun(self) -> None:
        """Note that the first step of all has ended."""
        self._is_silent = True

    @contextmanager
    def once(self) -> Iterator[None]:
        """Drop what a block of steps prints and logs, but for the first step of all."""
        thread, shown = threading.get_ident(), sys.stdout

        def silences(record: object = None) -> bool:
            return self._is_silent and threading.get_ident() == thread

        def heeds(record: logging.LogRecord) -> bool:
            return not silences()

        with ExitStack() as stack:
            for handler in list(_printing_handlers()):
                stack.callback(handler.removeFilter, heeds)
                handler.addFilter(heeds)
            stack.enter_context(redirect_stdout(_Stream(thread, silences, shown, sys.stdout)))
            stack.enter_context(redirect_stderr(_Stream(thread, silences, shown, sys.stderr)))
            yield


@contextmanager
def streams_kept() -> Iterator[None]:
    """Put the streams back: what is printed after an interrupt inside is shown."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Stream(TextIOBase):
    """In one thread what shows on `shown`, or nowhere once it `silences`; in others `found`
    as before.
    """

    def __init__(self, thread: int, silences: Any, shown: Any, found: Any) -> None:
        self._thread, self._silences, self._shown, self._found = thread, silences, shown, found

    def _stream(self) -> Any:
        return self._shown if threading.get_ident() == self._thread else self._found

    def write(self, text: str) -> int:
        return len(text) if self._silences() else int(self._stream().write(text) or len(text))

    def flush(self) -> None:
        if not self._silences():
            self._stream().flush()


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
