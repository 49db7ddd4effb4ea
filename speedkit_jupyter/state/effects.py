"""Suppress displays, logs, figures and widgets of measured steps; report lasting effects."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any

import torch

from speedkit_jupyter.state.ownership import PACKAGE, is_installed
from speedkit_jupyter.support.source_lines import is_user_code_boundary
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.dynamo import COMPILERS

# Types of Jupyter messages about widgets.
WIDGET_MESSAGES = frozenset(["comm_open", "comm_msg", "comm_close"])
WIDGET = "application/vnd.jupyter.widget-view+json"


class Output:
    """Hide the widgets of steps, and all displays and logs after the first step that makes any.

    `release` closes new widgets and figures. Each warning is shown once, and none from forked
    processes. A step's log lines, except torch's and SpeedKit's, reach only stdout and stderr.
    """

    def __init__(self) -> None:
        self._first: FrameType | None = None  # frame of the first call with output
        self._warned = set[Any]()
        self._process = os.getpid()
        self._gates = ExitStack()

    def hold(self) -> None:
        """Start filtering output; may be called again after `release`."""
        self._figures, self._widgets = set(_figures()), set(_widgets())
        self._streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        self._gate(logging.Handler, "handle", self._may_log)
        self._gate(warnings, "showwarning", self._is_new)
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
        if (publisher := getattr(shell := get_ipython(), "display_pub", None)) is not None:
            self._gate(publisher, "publish", self._may_show)
            self._gate(publisher, "clear_output", lambda *_, **__: calling_step() is None)
        if (session := getattr(getattr(shell, "kernel", None), "session", None)) is not None:
            self._gate(session, "send", self._may_send)

    def release(self, for_good: bool = True) -> None:
        """Close new figures and widgets, show output again; `for_good` forgets the first call."""
        for number in set(_figures()) - self._figures:
            sys.modules["matplotlib._pylab_helpers"].Gcf.destroy(number)
        for model_id in (every := _widgets()).keys() - self._widgets:
            with suppress(Exception):  # the user's class may define its own `close`
                every[model_id].close()
        self._gates.close()
        if for_good:
            self._first = None  # a frame keeps its variables alive

    def _gate(self, holder: Any, name: str, allows: Callable[..., bool]) -> None:
        """Patch the function `holder.name` until `release`: it runs only if `allows` is True."""
        own, found = vars(holder).get(name), getattr(holder, name)

        def gate(*given: Any, **named: Any) -> Any:
            return found(*given, **named) if allows(*given, **named) else None

        undo = (delattr, holder, name) if own is None else (setattr, holder, name, own)
        self._gates.callback(*undo)
        setattr(holder, name, gate)

    def _is_shown(self, step: FrameType) -> bool:
        self._first = self._first or step
        return step is self._first

    def _may_show(self, data: Any = None, *given: Any, **named: Any) -> bool:
        step = calling_step()
        return step is None or (self._is_shown(step) and WIDGET not in (data or {}))

    def _may_log(self, handler: logging.Handler, record: logging.LogRecord) -> bool:
        step = calling_step()
        if step is None or record.name.startswith(("torch", PACKAGE)):
            return True
        return getattr(handler, "stream", None) in self._streams and self._is_shown(step)

    def _may_send(self, stream: Any, message: Any, *_: Any, **__: Any) -> bool:
        kind = message if isinstance(message, str) else message.get("msg_type")
        return kind not in WIDGET_MESSAGES or calling_step() is None

    def _is_new(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> bool:
        warning = str(message), category, line
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new and os.getpid() == self._process


def calling_step(libraries: tuple[str, ...] = ()) -> FrameType | None:
    """Return the frame that runs the step; None outside steps, and in calls by `libraries`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code_boundary(frame.f_code):
        is_library = str(frame.f_globals.get("__name__")).startswith(libraries)
        if is_library and frame.f_code.co_name != "_modified_open":  # IPython's `open` for cells
            return None
        frame = frame.f_back
    return frame


def _widgets() -> dict[str, Any]:
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if hasattr(module, "_instances"):
        return dict(module._instances)
    return getattr(getattr(module, "Widget", None), "widgets", {})  # before ipywidgets 8


def _figures() -> dict[int, Any]:
    return getattr(getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None), "figs", {})


# --- lasting effects ---

# EVENTS has a description of each audit event: {0} is its first argument, and {1} its name.
FILES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "sqlite3.connect",
)  # fmt: skip
PROCESS_STARTS = (
    "subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec",
)  # fmt: skip
SOCKETS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
EVENTS = {
    **dict.fromkeys(FILES, "changes the file {0} ({1})"),
    **dict.fromkeys(PROCESS_STARTS, "starts a process ({1})"),
    **dict.fromkeys(SOCKETS, "uses a socket ({1})"),
    "import": "imports {0} for the first time",
    "_thread.start_new_thread": "starts a thread",
    "open": "opens the file {0} for writing",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Effects of these libraries are not reported: they manage their own caches, threads and files.
LIBRARIES = (
    "importlib", "_frozen_importlib", *COMPILERS, "torch.utils.data", "torch.utils.cpp_extension",
    "triton", "tqdm", "ctypes", "linecache",
)  # fmt: skip
# Only the last listener gets events. Audit hooks can't be removed, so one hook serves all.
_LISTENERS: list[Callable[[str, tuple[Any, ...]], None]] = []


@cache
def _install() -> None:
    def hear(event: str, given: tuple[Any, ...]) -> None:
        if _LISTENERS and event in EVENTS:
            _LISTENERS[-1](event, given)

    sys.addaudithook(hear)


@contextmanager
def effects_named(say: Callable[[list[str]], None]) -> Iterator[None]:
    """Call `say` before a lasting effect of this thread's steps; an error in `say` prevents it."""
    here, busy = (os.getpid(), threading.get_ident()), False

    def listen(event: str, given: tuple[Any, ...]) -> None:
        nonlocal busy
        is_here = (os.getpid(), threading.get_ident()) == here  # False in other threads and forks
        effect = _effect(event, given) if is_here and not busy else None
        # IPython's `!rm log` is an effect of the user's code; files that IPython writes are not.
        shells = () if event in PROCESS_STARTS else ("IPython", "ipykernel")
        if effect is not None and calling_step((*LIBRARIES, *shells)) is not None:
            busy = True
            try:
                say([f"the step {effect}: this can't be put back"])
            finally:
                busy = False

    _install()
    _LISTENERS.append(listen)
    try:
        with patched(torch, "save", _saving), patched(threading.Thread, "start", _starting):
            yield
    finally:
        _LISTENERS.remove(listen)


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    def saving(obj: Any, f: Any, *given: Any, **named: Any) -> None:
        if isinstance(f, str | os.PathLike):  # torch may open the file in C++, without an event
            sys.audit("open", f, "wb", 0)
        save(obj, f, *given, **named)

    return saving


def _starting(start: Callable[..., None]) -> Callable[..., None]:
    def starting(thread: threading.Thread) -> None:
        sys.audit("_thread.start_new_thread")  # only Python 3.12 raises this event itself
        start(thread)

    return starting


def _effect(event: str, given: tuple[Any, ...]) -> str | None:
    """Return a description of the lasting effect; None for an event without one."""
    about: Any = given[0] if given else ""
    if event == "import" and is_installed(about):
        return None
    if event == "open":
        about, mode, flags = given
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & WRITING
        if not writes or isinstance(about, int) or about == os.devnull:
            return None
        about = os.fsdecode(about)
    return EVENTS[event].format(about, event)
