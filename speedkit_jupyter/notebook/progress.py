"""Run a measurement and show its progress at intervals, then its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from threading import Event, Thread
from typing import Any

from IPython import get_ipython
from IPython.display import display

from speedkit_jupyter.notebook.namespace import check_result_name
from speedkit_jupyter.notebook.options import Names
from speedkit_jupyter.notebook.session import current
from speedkit_jupyter.report.comparison_report import live_report
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.comparison import Progress
from speedkit_jupyter.support import messages

# Minimum seconds between two updates, because users can't read more than two a second.
INTERVAL_S = 0.5
# After this many seconds without news (while compiling, for example), the display counts seconds.
SILENT_S = 2.0


def run_and_show(
    engine: Any,
    title: str,
    names: Names,
    variable: str | None,
    value_of: Callable[[Any], Any] = lambda result: result,
    is_quiet: bool = False,
) -> Any:
    """Run an engine, show the result's report unless `is_quiet`, and return the result.

    `variable` gets `value_of(result)`. Ctrl-C shows the results so far, and is then raised again.
    """
    check_result_name(variable, names)
    output, shown, was_stopped = LiveOutput(Document(title)), None, False
    streams = sys.stdout, sys.stderr
    try:
        try:
            with closing(engine.run()) as states:
                output.follow(never_falling(states), title)
        except KeyboardInterrupt:
            was_stopped = True
            sys.stdout, sys.stderr = streams  # Ctrl-C may have interrupted a redirection of output
            if not engine.has_results():
                raise
        result = engine.result()
        if variable:
            names[variable] = value_of(result)
        if was_stopped or not is_quiet:
            report = current().last_report = result.report()
            shown = report.brief()
    finally:
        output.end(shown)
    if was_stopped:
        raise KeyboardInterrupt
    return result


def never_falling(states: Iterable[Progress]) -> Iterator[Progress]:
    """Yield the states, but never let `done` fall, although each phase starts at 0."""
    done = 0.0
    for state in states:
        done = max(done, state.done)
        yield state._replace(done=done)


def is_kernel() -> bool:
    """Return whether code runs in a kernel, where shown outputs can be replaced."""
    return any(cls.__module__.startswith("ipykernel.") for cls in type(get_ipython()).__mro__)


def displayed(document: Document) -> Any:
    """In a kernel, display a document and return its display handle; elsewhere return None."""
    return display(document, display_id=True) if is_kernel() else None


class LiveOutput:
    """A display whose document is replaced at most twice a second.

    Outside a kernel, or with the verbosity `quiet`, only the last document is shown.
    """

    def __init__(self, first: Document) -> None:
        self._last: Document | None = first
        self._drawn_s = 0.0
        self._handle: Any = None if messages.verbosity() == "quiet" else displayed(first)

    def __enter__(self) -> LiveOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self.end(self._last)

    def say(self, text: str) -> None:
        """Show a short message about the work in progress."""
        self.show(Document(f"{text} …"))

    def show(self, document: Document) -> None:
        """Store the newest document; draw it if the last drawing was at least INTERVAL_S ago."""
        self._last = document
        if self._is_due():
            self._drawn_s = time.monotonic()
            self._handle.update(document)

    def follow(self, states: Iterable[Progress], title: str) -> None:
        """Show an engine's progress until the engine ends; a thread counts seconds without news."""
        latest, ended = [(Progress(0.0, ""), time.monotonic())], Event()
        counting = Thread(target=self._count_silence, args=(latest, ended, title), daemon=True)
        if self._handle is not None:
            counting.start()
        try:
            for state in states:
                latest[0] = state, time.monotonic()
                if self._is_due():  # making a report takes longer than a short block of steps
                    self.show(live_report(state, title))
        finally:
            ended.set()
            if self._handle is not None:
                counting.join()

    def end(self, result: Document | None) -> None:
        """Show `result` in the live display or, without one, below. None empties the display."""
        if self._handle is not None:
            self._handle.update(result or {"text/plain": "", "text/html": ""}, raw=result is None)
        elif result is not None:
            display(result)

    def _is_due(self) -> bool:
        return self._handle is not None and time.monotonic() - self._drawn_s >= INTERVAL_S

    def _count_silence(self, latest: list[tuple[Progress, float]], end: Event, title: str) -> None:
        while not end.wait(INTERVAL_S):
            state, since_s = latest[0]
            silent_s = time.monotonic() - since_s
            if silent_s >= SILENT_S:
                counted = state._replace(text=f"{state.text}, {silent_s:.0f} s")
                self.show(live_report(counted, title))
