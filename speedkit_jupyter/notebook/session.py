"""The memory of one notebook: its names, its panels, the step that it measured."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from IPython.core.error import UsageError

from speedkit_jupyter.plans.applying import trained_by
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.lookup import named
from speedkit_jupyter.support.weak import Listeners


@dataclass(frozen=True)
class MeasuredCell:
    """The last `%%speedbench` cell: its first line, its text, and a function that returns its step.

    Each call makes a new step, so that no model is kept alive by having been measured.
    """

    title: str
    command: str
    step: Callable[[], Step]


class Session:
    """`names` is the notebook's namespace, if there is one.

    `listeners` are called after a measured cell and after a tuning; `panels` holds
    the state that the panels of one model share, by the model's id; `last_report` is the report of
    the last measurement, with all of its notes.
    """

    def __init__(self, names: MutableMapping[str, Any] | None = None) -> None:
        self.names = names
        self.last_advice: Any = None
        self.last_report: Any = None
        self.listeners = Listeners()
        self.panels: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.measured: MeasuredCell | None = None
        MEMORY.listeners.add(self._tuned)

    def remember(self, cell: MeasuredCell) -> None:
        """Keep the last `%%speedbench` cell, and tell the listeners."""
        self.measured = cell
        self.listeners.tell("measured")

    def _tuned(self) -> None:
        self.listeners.tell("tuned")

    def last_cell(self) -> MeasuredCell:
        """Return the last `%%speedbench` cell; raises UsageError without one."""
        if self.measured is None:
            raise UsageError(
                "which step? Run a %%speedbench cell before, or name a function: --step train_step"
            )
        return self.measured

    def optimizers_of(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold a parameter of the model, other than a Trainer's own."""
        is_mine = not trained_by(model, self.names or {})
        return holding(named(self.names, torch.optim.Optimizer, is_mine).values(), model)


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
        for choice in list(session.panels.values()):
            choice.stop()
    _CURRENT.clear()
    MEMORY.forget()
