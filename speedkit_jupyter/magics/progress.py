"""Run an engine: progress that ends as the result, in its place, and leaves no trace."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import closing
from typing import Any

from IPython.display import display

from speedkit_jupyter.magics.errors import STOPPED
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.live import live_line, live_report, waiting
from speedkit_jupyter.support import messages

# Front ends draw each update; more than this many a second only cost time.
INTERVAL_S = 0.2


def measured(
    engine: Any,
    title: str,
    names: MutableMapping[str, Any],
    variable: str | None,
    value_of: Callable[[Any], Any] = lambda result: result,
    tried: Sequence[str] = (),
    is_quiet: bool = False,
    draws: bool = False,
) -> Any:
    """Run an engine to its end, show the result and return it; `variable` gets its value.

    Ctrl-C does the same with what is known so far, and stops the notebook.
    """
    __tracebackhide__ = True

    def end() -> Any:
        result = engine.result()
        if variable:
            names[variable] = value_of(result)
        if not is_quiet:
            progress.replace(result)
        return result

    with ProgressLine(title, tried, draws and not is_quiet) as progress:
        try:
            with closing(engine.run()) as states:
                for state in states:
                    progress.show(state)
        except KeyboardInterrupt:
            if engine.has_results():
                is_quiet = False
                end()
            raise KeyboardInterrupt(STOPPED) from None
        return end()


class ProgressLine:
    """Shows each `show(progress)` while its block runs; `replace` puts the result in its place.

    `names` are the variants, which stand in the table from the start. Uses display updates, which
    every front end has, never a widget; in a terminal it rewrites one line of stderr. Without a
    result it ends empty. Where that `draws` a picture, what drawing needs is loaded first.
    """

    def __init__(self, title: str, names: Sequence[str] = (), draws: bool = False) -> None:
        self._draws = draws
        self._title, self._names, self._last, self._on_terminal = title, names, 0.0, False
        self._handle: Any = None

    def __enter__(self) -> ProgressLine:
        if messages.verbosity() == "quiet":
            return self
        begin = Document(self._title)
        self._handle = display(begin, display_id=True) if _has_updates() else None
        self._on_terminal = self._handle is None and sys.stderr.isatty()
        if self._handle is not None and self._draws:
            plots.ready()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
        self._rewrite("")

    def show(self, progress: Progress) -> None:
        """Show where it is now; it is drawn at most some times a second."""
        now = time.monotonic()
        if now - self._last < INTERVAL_S:
            return
        self._last = now
        if self._handle is not None:
            self._handle.update(live_report(waiting(progress, self._names), self._title))
        self._rewrite(live_line(progress, self._title))

    def replace(self, result: Any) -> None:
        """Show the result where the progress was; in a terminal, simply show it."""
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


def _has_updates() -> bool:
    """Only a kernel can update what it displayed; a terminal would print line after line."""
    from IPython import get_ipython

    return any(kind.__module__.startswith("ipykernel.") for kind in type(get_ipython()).__mro__)
