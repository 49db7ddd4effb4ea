"""The magics `%speedkit auto` and `%%speedkit auto`."""

from __future__ import annotations

import time
from argparse import Namespace
from contextlib import suppress
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.extras.auto.api import made
from speedkit_jupyter.extras.auto.report import report
from speedkit_jupyter.extras.auto.session import OVERHEAD, Auto, live_line
from speedkit_jupyter.notebook.options import Names, Option, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import displayed
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.weak import at_unload

# Seconds between two updates of the live line: a user reads no more than two a second.
INTERVAL_S = 0.5
# Cells that begin with these magics measure by themselves, so `auto` leaves them out.
OURS = ("%%speedbench", "%speedbench", "%speedkit", "%%speedkit")
ON = "auto is on: plans race in the cells that train from now on. `%speedkit auto off` ends it."
OFF = "auto is off; flags, models and optimizers are as they were, and what was trained stays."


class CellRaces:
    """The races in a shell's cells: a live line while a cell runs, and a summary after it."""

    def __init__(self, shell: Any, auto: Auto) -> None:
        self.auto, self._shell = auto, shell
        self._handle: Any = None
        self._drawn_s = 0.0
        self._lines: list[str] = []
        self._events = {"pre_run_cell": self._before, "post_run_cell": self._after}

    def begin(self) -> None:
        """Register the shell's events; races start with the next cell."""
        for name, call in self._events.items():
            self._shell.events.register(name, call)
        self.auto.begin()
        self.auto.pause()

    def end(self) -> None:
        """Unregister the shell's events, and restore flags, models and optimizers."""
        for name, call in self._events.items():
            with suppress(ValueError):
                self._shell.events.unregister(name, call)
        self.auto.end()

    def say(self, line: str) -> None:
        """Keep a line for the summary at the end of the cell."""
        self._lines.append(line)

    def changed(self, auto: Auto) -> None:
        """Update the live line, at most twice a second."""
        now = time.monotonic()
        if now - self._drawn_s < INTERVAL_S or auto.latest is None:
            return
        self._drawn_s = now
        if messages.verbosity() != "quiet":
            document = Document(live_line(auto.latest))
            if self._handle is None:
                self._handle = displayed(document)
            else:
                self._handle.update(document)

    def before_cell(self) -> None:
        """Reset the live line, and watch a cell that begins."""
        self._handle, self._lines, self._drawn_s = None, [], time.monotonic()
        self.auto.begin_cell()

    def after_cell(self) -> None:
        """Show the summary of a cell's loops."""
        lines = [*self._lines, *self.auto.end_cell()]
        self.auto.pause()
        if lines and messages.verbosity() != "quiet":
            document = Document(lines[0], ["\n".join(lines[1:])])
            if self._handle is None:
                display(document)
            else:
                self._handle.update(document)
        self._handle = None

    def _before(self, info: Any = None) -> None:
        if not str(getattr(info, "raw_cell", "")).lstrip().startswith(OURS):
            self.before_cell()

    def _after(self, result: Any = None) -> None:
        if not self.auto.is_paused:
            self.after_cell()


# State at module level, because torch's hooks belong to the whole process.
_RUNNING: list[CellRaces] = []


def off() -> None:
    """Switch `auto` off in this process."""
    while _RUNNING:
        _RUNNING.pop().end()


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


OPTIONS = (
    Option(
        "--overhead",
        "PERCENT",
        f"of the run that slower plans may cost at any moment ({100 * OVERHEAD:g})",
        type=_share,
        default=OVERHEAD,
    ),
    Option(
        "--eval",
        "WORD",
        "calls without gradients: under the winner, or as written (plan)",
        choices=("plan", "exact"),
        default="plan",
    ),
)


@command(
    "plans race on the steps of your own loops while they train",
    Option("word", "WORD", "on, off or status (on)", nargs="?", choices=("on", "off", "status")),
    *OPTIONS,
)
def auto(names: Names, session: Session, arguments: Namespace) -> None:
    word = arguments.word or "on"
    if word == "status":
        display(report(_RUNNING[0].auto if _RUNNING else None))
        return
    was_on = bool(_RUNNING)
    off()
    if word == "on":
        _begin(arguments).begin()
        display(Document(ON))
    else:
        display(Document(OFF if was_on else "auto was off already."))


def _begin(arguments: Namespace) -> CellRaces:
    shell = get_ipython()
    if shell is None:
        raise UsageError("auto: there is no IPython here: with speedkit_jupyter.auto(): …")
    held: list[CellRaces] = []
    running = made(arguments.overhead, arguments.eval, lambda line: held[0].say(line))
    cells = CellRaces(shell, running)
    held.append(cells)
    running.changed = cells.changed
    _RUNNING.append(cells)
    at_unload(off)
    return cells


def run_cell(names: Names, session: Session, arguments: Namespace, source: str) -> None:
    """Run one cell with `auto` on, for this cell alone if it was off."""
    shell: Any = get_ipython()
    if _RUNNING:
        _run(shell, source)
        return
    cells = _begin(arguments)
    try:
        cells.auto.begin()
        cells.before_cell()
        _run(shell, source)
    finally:
        cells.after_cell()
        off()


def _run(shell: Any, source: str) -> None:
    """Run a cell inside of a cell; its error goes up, to be shown once."""
    show = shell.showtraceback, shell.showsyntaxerror
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kwargs: None
    try:
        result = shell.run_cell(source, store_history=False)
    finally:
        del shell.showtraceback, shell.showsyntaxerror
        if (shell.showtraceback, shell.showsyntaxerror) != show:
            shell.showtraceback, shell.showsyntaxerror = show
    result.raise_error()


PLUGIN = Plugin([auto], cells={"auto": run_cell})
