"""A line of progress that leaves no trace in a saved notebook."""

from __future__ import annotations

import shutil
import sys
import time
from html import escape
from typing import Any

from IPython.display import display

WIDTH = 24
# Front ends draw each update; more than this many a second only cost time.
INTERVAL_S = 0.2


class ProgressLine:
    """Shows `show(done, text)` while its block runs; `replace` puts the result in its place.

    Uses display updates, which every front end has, never a widget; in a terminal it rewrites one
    line of stderr. Without a result it ends empty.
    """

    def __init__(self, title: str) -> None:
        self._title, self._last, self._on_terminal = title, 0.0, False
        self._handle: Any = None

    def __enter__(self) -> ProgressLine:
        self._handle = display(_Line(self._title), display_id=True) if _has_updates() else None
        self._on_terminal = self._handle is None and sys.stderr.isatty()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.update(_Line(""))
        self._rewrite("")

    def show(self, done: float, text: str) -> None:
        """`done` from 0 to 1."""
        now = time.monotonic()
        if now - self._last < INTERVAL_S:
            return
        self._last = now
        filled = round(done * WIDTH)
        line = f"{'█' * filled}{'░' * (WIDTH - filled)} {self._title}: {text}"
        if self._handle is not None:
            self._handle.update(_Line(line))
        self._rewrite(line)

    def replace(self, result: Any) -> None:
        """Show the result where the line was; in a terminal, simply show it."""
        if self._handle is None:
            self._rewrite("")
            display(result)
        else:
            self._handle.update(result)
            self._handle = None

    def _rewrite(self, line: str) -> None:
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{line[:width]}")
            sys.stderr.flush()


class _Line:
    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        html = f'<span style="opacity:.8;font-family:monospace">{escape(self._text)}</span>'
        return {"text/plain": self._text, "text/html": html if self._text else ""}


def _has_updates() -> bool:
    """Only a kernel can update what it displayed; a terminal would print line after line."""
    from IPython import get_ipython

    return any(kind.__module__.startswith("ipykernel.") for kind in type(get_ipython()).__mro__)
