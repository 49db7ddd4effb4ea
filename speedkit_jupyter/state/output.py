"""Hold back the output of a measured step: displays after its first call, repeated warnings, and
lines for log files.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from speedkit_jupyter.state.ownership import PACKAGE, is_the_users_class
from speedkit_jupyter.support.source_lines import is_user_code_boundary

# The messages by which a kernel tells the front end about widgets, and the MIME type of one.
OF_WIDGETS = frozenset(["comm_open", "comm_msg", "comm_close"])
WIDGET = "application/vnd.jupyter.widget-view+json"


class Output:
    """Drops what steps display while it holds; the first call is shown if it `shows_first`.

    A message belongs to a step if code of ours that calls the user's is among its callers. Widgets
    of steps are never shown; at the end they are closed, as are figures that steps left open. A
    warning is shown once, and none of a process that is forked meanwhile. Handlers of the logging
    module display what goes to the notebook, and write nothing elsewhere.
    """

    def __init__(self, shows_first: bool) -> None:
        self._shows_first = shows_first
        self._first: FrameType | None = None  # of the first call that displayed something
        self._widgets_of_steps: set[str] = set()
        self._warned = set[Any]()
        self._process = os.getpid()
        self._gates = ExitStack()

    def hold(self) -> None:
        """Begin; may be called again after `release`."""
        self._figures = set(_figures())
        self._streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        self._gate(logging.Handler, "handle", self._may_log)
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = get_ipython() if get_ipython is not None else None
        if (publisher := getattr(shell, "display_pub", None)) is not None:
            self._gate(publisher, "publish", self._may_show)
            self._gate(publisher, "clear_output", lambda *given, **named: calling_step() is None)
        if (session := getattr(getattr(shell, "kernel", None), "session", None)) is not None:
            self._gate(session, "send", self._may_send)
        self._gate(warnings, "showwarning", self._is_new)

    def release(self, for_good: bool = True) -> None:
        """End, and close what the steps made."""
        for number in set(_figures()) - self._figures:
            sys.modules["matplotlib._pylab_helpers"].Gcf.destroy(number)
        for model_id in self._widgets_of_steps & _widgets().keys():
            with suppress(Exception):  # a class of the user's may close in a way of its own
                _widgets()[model_id].close()
        self._gates.close()
        if for_good:
            self._first = None  # a frame keeps its variables alive

    def _gate(self, holder: Any, name: str, allows: Callable[..., bool]) -> None:
        """Let a function of one object run only for arguments that `allows` is true of."""
        own, found = vars(holder).get(name), getattr(holder, name)

        def gate(*given: Any, **named: Any) -> Any:
            return found(*given, **named) if allows(*given, **named) else None

        undo = (delattr, holder, name) if own is None else (setattr, holder, name, own)
        self._gates.callback(*undo)
        setattr(holder, name, gate)

    def _may_show(self, data: Any = None, *given: Any, **named: Any) -> bool:
        if (step := calling_step()) is None:
            return True
        self._first = self._first or step
        return self._shows_first and step is self._first and WIDGET not in (data or {})

    def _may_log(self, handler: logging.Handler, record: logging.LogRecord) -> bool:
        step, stream = calling_step(), getattr(handler, "stream", None)
        if step is None or record.name.startswith(("torch", PACKAGE)):
            return True
        if stream in self._streams:
            self._first = self._first or step
            return self._shows_first and step is self._first
        return stream is None and not type(handler).__module__.startswith("logging")

    def _may_send(self, stream: Any, message: Any, content: Any = None, *_: Any, **__: Any) -> bool:
        kind = message if isinstance(message, str) else message.get("msg_type")
        number = (content or {}).get("comm_id", "")
        if kind == "comm_open" and calling_step() is not None:
            self._widgets_of_steps.add(number)
        return kind not in OF_WIDGETS or number not in self._widgets_of_steps

    def _is_new(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> bool:
        warning = str(message), category, line
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new and os.getpid() == self._process


def calling_step(libraries: tuple[str, ...] = ()) -> FrameType | None:
    """Return the innermost frame of ours that called the user's code, not through `libraries`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code_boundary(frame.f_code):
        if str(frame.f_globals.get("__name__")).startswith(libraries):
            return None
        frame = frame.f_back
    return frame


def users_log_handlers() -> list[logging.Handler]:
    """Return the handlers of the user's own classes: what they collect is state of the step."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = [one for logger in loggers for one in getattr(logger, "handlers", ())]
    return [one for one in handlers if is_the_users_class(type(one))]


def _widgets() -> dict[str, Any]:
    """Return all widgets by their ids; nothing if ipywidgets is not loaded."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    found = getattr(module, "_instances", None)
    if found is None:  # before ipywidgets 8
        found = getattr(getattr(module, "Widget", None), "widgets", None)
    return found if isinstance(found, dict) else {}


def _figures() -> dict[int, Any]:
    gcf = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    return getattr(gcf, "figs", {})
