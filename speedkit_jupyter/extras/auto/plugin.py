"""The magics `%speedkit auto` and `%%speedkit auto`."""

from __future__ import annotations

import time
from argparse import Namespace
from contextlib import suppress
from typing import Any

from IPython import get_ipython
from IPython.display import display

from speedkit_jupyter.extras.auto.auto import OVERHEAD, Auto
from speedkit_jupyter.extras.auto.raced_loop import RacedLoop
from speedkit_jupyter.extras.auto.report import live_line, report, summary
from speedkit_jupyter.notebook.options import Names, Option, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import INTERVAL_S, LiveOutput
from speedkit_jupyter.notebook.session import Session, current
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.weak import at_unload

# `auto` skips cells that begin with these magics: they may run a benchmark, or an inner cell.
OURS = ("%%speedbench", "%speedbench", "%speedkit", "%%speedkit")
NOT_ON = "auto is off: `%speedkit auto` switches it on."
ON = "auto is on: plans race in the cells that train from now on. `%speedkit auto off` ends it."
OFF = "auto is off; flags, models and optimizers are as they were, and what was trained stays."


class CellRaces:
    """The races in a shell's cells, with a live line during a cell and a summary after the cell."""

    def __init__(self, shell: Any, arguments: Namespace) -> None:
        self._shell = shell
        self._lines: list[str] = []  # shown at the end of the cell
        self.auto = Auto(arguments.overhead, arguments.eval, self._lines.append, self._changed)
        self._live: LiveOutput | None = None
        self._drawn_s = 0.0
        self._events = {"pre_run_cell": self._before, "post_run_cell": self._after}

    def begin(self) -> None:
        """Register the shell's callbacks and torch's hooks; races start with the next cell."""
        _RUNNING.append(self)
        at_unload(off)
        for name, call in self._events.items():
            self._shell.events.register(name, call)
        self.auto.begin()
        current().show_auto(ON)

    def end(self) -> None:
        """Remove callbacks and hooks; restore flags, models and optimizers; keep trained values."""
        for name, call in self._events.items():
            with suppress(ValueError):
                self._shell.events.unregister(name, call)
        self.auto.end()
        current().show_auto("")
        current().last_races.clear()

    def _changed(self, loop: RacedLoop) -> None:
        """Update the live line, at most twice a second."""
        now = time.monotonic()
        if now - self._drawn_s < INTERVAL_S:
            return
        self._drawn_s, document = now, Document(live_line(loop))
        current().show_auto(document.headline)
        self._live = self._live or LiveOutput(document)
        self._live.show(document)

    def _before(self, info: Any = None) -> None:
        """Watch the cell that is about to run, unless its text begins with a magic in OURS."""
        if not str(getattr(info, "raw_cell", "")).lstrip().startswith(OURS):
            self._live, self._drawn_s = None, time.monotonic()
            self._lines.clear()
            self.auto.begin_cell()

    def _after(self, result: Any = None) -> None:
        """End a watched cell: pause its races, then record and show their summaries."""
        if self.auto.is_paused:
            return
        lines, told = [*self.auto.end_cell(), *self._lines], ""
        for loop in (one for one in self.auto.loops if one.totals.steps):
            told = summary(loop, busy=self.auto.busy)
            current().last_races.update(dict.fromkeys(loop.plans.live_models, told))
        if self._live is not None:  # the summary follows the cell's own output
            self._live.end(None)
            lines = lines or [told]
        if not lines:
            return
        current().show_auto(lines[0])
        if messages.verbosity() != "quiet":
            display(Document(lines[0], ["\n".join(lines[1:])]))


# The active CellRaces, if any; a global, because torch's hooks are process-wide.
_RUNNING: list[CellRaces] = []


def off() -> None:
    while _RUNNING:
        _RUNNING.pop().end()


def percent(text: str) -> float:
    if not 0 <= (number := float(text.removesuffix("%"))) <= 100:
        raise ValueError  # argparse names the option and the value
    return number / 100


@command(
    "plans race on the steps of your own loops while they train",
    Option("word", "WORD", "on, off or status (on)", nargs="?", choices=("on", "off", "status")),
    Option(
        "--overhead",
        "PERCENT",
        f"of the run that examinations and slower plans may cost ({100 * OVERHEAD:g})",
        type=percent,
        default=OVERHEAD,
    ),
    Option(
        "--eval", "WORD", "calls without gradients: under the winner, or as written (plan)",
        choices=("plan", "exact"), default="plan",
    ),
)  # fmt: skip
def auto(names: Names, session: Session, arguments: Namespace) -> None:
    word = arguments.word or "on"
    if word == "status":
        now = _RUNNING[0].auto if _RUNNING else None
        display(Document(NOT_ON) if now is None else report(now.latest, now.refused, now.busy))
        return
    was_on = bool(_RUNNING)
    off()
    if word == "on":
        CellRaces(get_ipython(), arguments).begin()
        display(Document(ON))
    else:
        display(Document(OFF if was_on else "auto was off already."))


def run_cell(names: Names, session: Session, arguments: Namespace, source: str) -> None:
    """Run one cell with `auto` on; if `auto` was off before, switch it off afterwards."""
    shell: Any = get_ipython()
    was_on = bool(_RUNNING)
    if not was_on:
        CellRaces(shell, arguments).begin()
    try:
        _run(shell, source)
    finally:
        if not was_on:
            off()


def _run(shell: Any, source: str) -> None:
    """Run `source` as a cell inside a cell; raise any error, with only the user's lines shown."""
    show = shell.showtraceback, shell.showsyntaxerror
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **kwargs: None
    try:
        result = shell.run_cell(source, store_history=False)
    finally:
        del shell.showtraceback, shell.showsyntaxerror
        if (shell.showtraceback, shell.showsyntaxerror) != show:
            shell.showtraceback, shell.showsyntaxerror = show
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return
    if not hasattr(error, "_render_traceback_"):
        kind, trace, formatter = type(error), error.__traceback__, shell.InteractiveTB
        lines = formatter.structured_traceback(kind, error, trace, tb_offset=1)
        vars(error)["_render_traceback_"] = lambda: lines  # a cycle with `error` would keep models
    raise error


PLUGIN = Plugin([auto], cells={"auto": run_cell})
