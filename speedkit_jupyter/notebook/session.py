"""The state of one notebook session: names, panels, and the last measured cell."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from IPython.core.error import UsageError

from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.weak import Listeners


@dataclass(frozen=True)
class MeasuredCell:
    """A measured `%%speedbench` cell: its first line, its text, and its step."""

    title: str
    command: str
    step: Callable[[], Step]  # returns a new step, so that no model is kept alive


class Session:
    """The state of a notebook session; `names` is its namespace, if any.

    `listeners` are called after a cell is measured. `last_report` is the full report of the last
    measurement that a magic showed. `auto_line` is the last line that `%speedkit auto` showed, and
    is empty while `auto` is off. `last_races` maps each model to a summary of its last loop under
    `auto`. `last_advice` is the last result of `%speedkit advise`.
    """

    def __init__(self, names: MutableMapping[str, Any] | None = None) -> None:
        self.names = names
        self.last_advice: Any = None
        self.last_report: Any = None
        self.auto_line = ""
        self.last_races: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.listeners = Listeners()
        self.panels: WeakSet[Any] = WeakSet()
        self.measured: MeasuredCell | None = None

    def remember(self, cell: MeasuredCell) -> None:
        """Store a `%%speedbench` cell as the last measured cell, and notify the listeners."""
        self.measured = cell
        self.listeners.tell()

    def show_auto(self, line: str) -> None:
        """Store the line of `%speedkit auto` (empty if off), and show the line in each panel."""
        self.auto_line = line
        for panel in list(self.panels):
            panel.show_auto()

    def last_cell(self) -> MeasuredCell:
        """Return the last `%%speedbench` cell; raises UsageError if no such cell was measured."""
        if self.measured is None:
            raise UsageError(
                "which step? Run a %%speedbench cell first, or name a function: --step train_step"
            )
        return self.measured


# A global, because plans, flags and the notebook belong to the process.
_CURRENT: list[Session] = []


def current(names: MutableMapping[str, Any] | None = None) -> Session:
    """Return the session of this process; `names` becomes its namespace if it has none."""
    if not _CURRENT:
        _CURRENT.append(Session())
    if names is not None and _CURRENT[0].names is None:
        _CURRENT[0].names = names
    return _CURRENT[0]


def begin(names: MutableMapping[str, Any]) -> Session:
    """Return the session of the shell with this namespace; end any session of another shell."""
    if current(names).names is not names:
        end()
    return current(names)


def end() -> None:
    """End the session: forget search results; panels stop measuring after the current block."""
    for session in _CURRENT:
        for panel in list(session.panels):
            panel.stop()
    _CURRENT.clear()
    MEMORY.forget()
