"""Run an engine: progress that ends as the result, in its place, and leaves no trace."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from IPython import get_ipython
from IPython.display import display

from speedkit_jupyter.notebook.namespace import check_result_name
from speedkit_jupyter.notebook.options import Names
from speedkit_jupyter.notebook.session import current
from speedkit_jupyter.report.comparison_report import live_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.support import messages

# Front ends draw each update: more than one in this many seconds only cost time.
INTERVAL_S = 0.2


def measured(
    engine: Any,
    title: str,
    names: Names,
    variable: str | None,
    value_of: Callable[[Any], Any] = lambda result: result,
    is_quiet: bool = False,
) -> Any:
    """Run an engine to its end, show the result and return it; `variable` gets its value.

    Ctrl-C does the same with what is known so far, and stops the notebook.
    """
    check_result_name(variable, names)
    line, shown, was_stopped = ProgressLine(title), None, False
    streams = sys.stdout, sys.stderr
    try:
        try:
            with closing(engine.run()) as states:
                for state in states:
                    line.show(state)
        except KeyboardInterrupt:
            was_stopped = True
            sys.stdout, sys.stderr = streams  # a block of the cell may have been cut short
            if not engine.has_results():
                raise
        result = engine.result()
        if variable:
            names[variable] = value_of(result)
        if was_stopped or not is_quiet:
            report = current().last_report = result.report()
            shown = report.brief()
    finally:
        line.end(shown)
    if was_stopped:
        raise KeyboardInterrupt
    return result


def displayed(document: Document) -> Any:
    """Display a document and return its handle; None outside a kernel, which prints each update."""
    classes = type(get_ipython()).__mro__
    is_kernel = any(cls.__module__.startswith("ipykernel.") for cls in classes)
    return display(document, display_id=True) if is_kernel else None


class ProgressLine:
    """Shows progress, and the result in its place, by display updates, as notebooks have them."""

    def __init__(self, title: str) -> None:
        self._title, self._last = title, 0.0
        is_quiet = messages.verbosity() == "quiet"
        self._handle = None if is_quiet else displayed(Document(title))

    def show(self, progress: Progress) -> None:
        """Show where it is now; it is drawn at most some times a second."""
        now = time.monotonic()
        if now - self._last < INTERVAL_S:
            return
        self._last = now
        if self._handle is not None:
            self._handle.update(live_report(progress, self._title))

    def end(self, result: Document | None) -> None:
        """Show the result, or nothing, where the progress was."""
        if self._handle is not None:
            self._handle.update(result or {"text/plain": "", "text/html": ""}, raw=result is None)
        elif result is not None:
            display(result)


class Updated:
    """A report that later ones replace; where only text is shown, the last one ends it."""

    def __init__(self, first: Document) -> None:
        self._last, self._drawn_s = first, 0.0
        self._handle = displayed(first)
        self._drawn: Document | None = None

    def __enter__(self) -> Updated:
        return self

    def say(self, text: str) -> None:
        """Show a few words about the work in progress."""
        self.show(Document(f"{text} …"))

    def show(self, document: Document) -> None:
        """Show this one from now on; it is drawn at most some times a second."""
        self._last, now = document, time.monotonic()
        if self._handle is not None and now - self._drawn_s > INTERVAL_S:
            self._drawn_s, self._drawn = now, document
            self._handle.update(document)

    def __exit__(self, *error: object) -> None:
        if self._handle is None:
            display(self._last)
        elif self._drawn is not self._last:
            self._handle.update(self._last)
