"""Lines about torch.compile while a cell runs and after it; imports for it between cells.

Importing this loads no torch. Nothing is said in cells before Dynamo is loaded, which is what
`torch.compile` loads first.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import Context, copy_context
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.units import seconds
from speedkit_jupyter.torchglue import dynamo as torch_private

if TYPE_CHECKING:
    from speedkit_jupyter.plans.compile_history import Finding, History
    from speedkit_jupyter.plans.context import SpeedContext

# Compiling that takes less is not worth a line, nor an estimate for the next time.
LEAST_S = 1.0
COMPILES = re.compile(r"\btorch\.compile\b|(?<!\bre)\.compile\(")
EVERY_S = 0.5
# Until importing begins: the cells of "Run all" follow one another sooner.
WAIT_S = 0.5


@cache
def history() -> History:
    """Return the one history of this process, as torch has one record of compilations."""
    from speedkit_jupyter.plans.compile_history import History

    return History()


class CompileWatch:
    """Shows compiling in the cells of a shell: a live line, and the faults after the cell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._line: LiveLine | None = None
        self._told: set[Finding] = set()
        self._idle = IdleImport()
        self._events = {"pre_run_cell": self._before, "post_run_cell": self._after}
        for name, call in self._events.items():
            shell.events.register(name, call)

    def end(self) -> None:
        """Watch no further cell."""
        self._idle.pause()
        if self._line is not None:
            self._line.end(False)
        for name, call in self._events.items():
            with suppress(ValueError):
                self._shell.events.unregister(name, call)
        if torch_private.is_dynamo_loaded():
            history().end()

    def _before(self, info: Any = None) -> None:
        self._idle.pause()
        # A cell that is about to compile loads Dynamo anyway.
        if "torch" in sys.modules and COMPILES.search(str(getattr(info, "raw_cell", ""))):
            torch_private.dynamo_config()
        if torch_private.is_dynamo_loaded():
            history().listen()
            history().begin_cell()
            self._line = LiveLine(history())

    def _after(self, result: Any = None) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.end(bool(getattr(result, "success", False)))
        if torch_private.is_dynamo_loaded():
            self._tell()
        self._idle.begin()

    def _tell(self) -> None:
        from IPython.display import display

        from speedkit_jupyter.notebook.stale_code import stale
        from speedkit_jupyter.report.compile_report import notice

        stale_now = set(stale(self._shell.user_ns))
        news = [*history().news(), *(stale_now - self._told)]
        self._told = stale_now
        if news and messages.verbosity() != "quiet":
            display(notice(news))


class LiveLine:
    """Shows the function that a cell is compiling, the seconds so far, and those of the last time.

    A thread of its own draws it, since compiling holds up the cell's.
    """

    def __init__(self, history: History) -> None:
        self._history, self._ended = history, threading.Event()
        self._context: Context = copy_context()  # by which a kernel knows the cell
        self._line: Any = None
        self._expected_s: float | None = None
        self._thread = threading.Thread(target=self._context.run, args=(self._draw,), daemon=True)
        self._thread.start()

    def end(self, is_done: bool) -> None:
        """Leave what was compiled in the line's place, and remember how long it took; neither if
        the cell was cut short.
        """
        from speedkit_jupyter.report.compile_report import compiled_line

        self._ended.set()
        self._thread.join()
        if self._line is not None:
            subject, took_s = self._history.subject, self._history.seconds
            self._line.end(compiled_line(subject, took_s) if is_done else None)
            if is_done:
                self._remember()

    def _draw(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._history.is_compiling and self._history.seconds >= LEAST_S:
                self._show()

    def _show(self) -> None:
        from speedkit_jupyter.notebook.progress import ProgressLine
        from speedkit_jupyter.report.compile_report import compiling_progress

        if self._line is None:
            if ProgressLine.is_open:
                return
            self._line = ProgressLine(f"compiling {self._history.subject}")
            self._expected_s = _known(self._history.subject)
        self._line.show(compiling_progress(self._history.seconds, self._expected_s))

    def _remember(self) -> None:
        from speedkit_jupyter.support import database

        if not self._history.recompiled:
            with suppress(SpeedKitError):
                name, took = _name(self._history.subject), {"seconds": self._history.seconds}
                database.keep("compiling", name, "", took)


def last_time(context: SpeedContext) -> str:
    """Return a line that says how long an applied plan took to compile the last time; empty where
    it compiles nothing, or that is not known.
    """
    from speedkit_jupyter.plans.compile_history import subject_of

    code = context.target.memo.compiled_call
    known_s = code and _known(subject_of(next(code.parts.every())))
    return f"The last time compiling it took {seconds(known_s)}" if known_s else ""


def _known(subject: str) -> float | None:
    from speedkit_jupyter.support import database

    with suppress(SpeedKitError):
        return (database.newest("compiling", _name(subject)) or {}).get("seconds")
    return None


def _name(subject: str) -> str:
    from speedkit_jupyter.machines.hardware import Hardware
    from speedkit_jupyter.plans.planning import describe

    hardware = Hardware.current()
    device = next((one.kind for one in hardware.accelerators), "cpu")
    return f"{subject}; {describe(hardware, device)}, torch {hardware.torch}"


# --- between cells ---


class IdleImport:
    """Imports the compiler while the kernel waits for the next cell, once a plan compiles, or one
    that was learned on this machine does.

    Dynamo and Inductor take seconds to import. A thread would make a running cell slower, so they
    are imported in the kernel's own loop, a part at a time: a cell that comes meanwhile waits for
    one part.
    """

    def __init__(self) -> None:
        self._parts: Iterator[str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Import from here on, until it is all there or `pause()`; only in a kernel."""
        with suppress(RuntimeError):  # no loop runs in IPython's terminal
            loop = asyncio.get_running_loop()
            if self._parts is None and is_wanted():
                self._parts = iter(torch_private.COMPILER_PARTS)
            if self._parts is not None:
                self._timer = loop.call_later(WAIT_S, self._import_next, loop)

    def pause(self) -> None:
        """Import no further while a cell runs."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _import_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if (name := next(self._parts or iter(()), None)) is None:
            return
        try:
            import_module(name)
        except Exception as error:  # the first compile says why
            messages.debug(f"{name} was not imported ahead: {in_a_line(error)}")
        self._timer = loop.call_later(0, self._import_next, loop)


def is_wanted() -> bool:
    """Return whether code is likely to be compiled in this process, and torch is loaded."""
    if "torch" not in sys.modules:
        return False
    from speedkit_jupyter.machines import compile_cache

    return torch_private.is_dynamo_loaded() or compile_cache.has_bundles()
