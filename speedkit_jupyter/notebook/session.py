"""The memory of one notebook: its names, its panels, the step that it measured."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from IPython.core.error import UsageError

from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.weak import Listeners


@dataclass(frozen=True)
class MeasuredCell:
    """The last `%%speedbench` cell: first line, text, and a function that returns a new step."""

    title: str
    command: str
    step: Callable[[], Step]  # new ones, so that no model is kept alive


class Session:
    """The memory of a notebook with the namespace `names`, if there is one.

    `listeners` are called after a measured cell; `panels` holds every panel;
    `last_report` is the report of the last measurement, with all of its notes.
    """

    def __init__(self, names: MutableMapping[str, Any] | None = None) -> None:
        self.names = names
        self.last_advice: Any = None
        self.last_report: Any = None
        self.listeners = Listeners()
        self.panels: WeakSet[Any] = WeakSet()
        self.measured: MeasuredCell | None = None

    def remember(self, cell: MeasuredCell) -> None:
        """Keep the last `%%speedbench` cell, and tell the listeners."""
        self.measured = cell
        self.listeners.tell()

    def last_cell(self) -> MeasuredCell:
        """Return the last `%%speedbench` cell; raises UsageError without one."""
        if self.measured is None:
            raise UsageError(
                "which step? Run a %%speedbench cell before, or name a function: --step train_step"
            )
        return self.measured


# State at module level, on purpose: plans and flags belong to the process, as one notebook does.
_CURRENT: list[Session] = []


def current(names: MutableMapping[str, Any] | None = None) -> Session:
    """Return the session of this process; `names` is the namespace for one that has none yet."""
    if not _CURRENT:
        _CURRENT.append(Session())
    if names is not None and _CURRENT[0].names is None:
        _CURRENT[0].names = names
    return _CURRENT[0]


def begin(names: MutableMapping[str, Any]) -> Session:
    """Return the session of a shell, and end another one's."""
    if current(names).names is not names:
        end()
    return current(names)


def end() -> None:
    """Forget the session, and stop its measurements between the cells."""
    for session in _CURRENT:
        for panel in list(session.panels):
            panel.stop()
    _CURRENT.clear()
    MEMORY.forget()
