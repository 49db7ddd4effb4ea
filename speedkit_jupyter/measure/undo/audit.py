"""Name what a step starts or writes outside the process, by Python's audit events."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.torch_private import COMPILERS
from speedkit_jupyter.support.tracebacks import is_user_code_boundary

TEXT = "the step {what}: that can't be put back"
FILES = frozenset(
    [
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
        "sqlite3.connect",
    ]
)  # fmt: skip
PROCESSES = frozenset(
    ["subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"]
)
SOCKETS = frozenset(["socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"])
THREADS = frozenset(["_thread.start_new_thread"])
EVENTS = FILES | PROCESSES | SOCKETS | THREADS | {"open"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Code that writes caches and starts helpers of its own: imports, compilers, workers of loaders.
OF_THEIR_OWN = (
    "importlib", "_frozen_importlib", *COMPILERS,
    "torch.utils.data", "torch.utils.cpp_extension", "triton", "tqdm", "ctypes", "linecache",
    "matplotlib", "IPython", "ipykernel",
)  # fmt: skip


# One measurement at a time listens; an audit hook can't be removed from a process.
_LISTENERS: list[Callable[[str, tuple[Any, ...]], None]] = []
_INSTALLED: list[bool] = []


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if _LISTENERS and event in EVENTS:
        _LISTENERS[-1](event, given)


@contextmanager
def named(say: Callable[[list[str]], None]) -> Iterator[None]:
    """Call `say` with a line for each thing that steps do in the block and that stays.

    It is called before the thing is done, so that an error raised in there prevents it. Only steps
    of ours in this thread count.
    """
    import torch

    here, busy = threading.get_ident(), False

    def listen(event: str, given: tuple[Any, ...]) -> None:
        nonlocal busy
        what = None if busy or threading.get_ident() != here else _what(event, given)
        if what is not None and _is_of_a_step(sys._getframe(2)):
            busy = True
            try:
                say([TEXT.format(what=what)])
            finally:
                busy = False

    if not _INSTALLED:
        sys.addaudithook(_hear)
        _INSTALLED.append(True)
    _LISTENERS.append(listen)
    try:
        with patched(torch, "save", _saving), patched(threading.Thread, "start", _starting):
            yield
    finally:
        _LISTENERS.remove(listen)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the event that torch.save does not: it opens its file in C++."""

    def call(*given: Any, **more: Any) -> Any:
        path = given[1] if len(given) > 1 else more.get("f")
        if isinstance(path, str | os.PathLike):
            sys.audit("open", path, "wb", 0)
        return save(*given, **more)

    return call


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the event that threads start without before Python 3.12."""

    def call(thread: threading.Thread) -> None:
        sys.audit("_thread.start_new_thread")
        start(thread)

    return call


def _what(event: str, given: tuple[Any, ...]) -> str | None:
    """Return in words what stays of it; None for an event that leaves nothing."""
    if event == "open":
        path, mode, flags = given
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & WRITING
        if not writes or isinstance(path, int) or path == os.devnull:
            return None
        return f"opens the file {os.fsdecode(path)} for writing"
    if event in FILES:
        return f"changes the file {given[0]} ({event})"
    if event in PROCESSES:
        return f"starts a process ({event})"
    if event in SOCKETS:
        return f"uses a socket ({event})"
    return "starts a thread" if event in THREADS else None


def _is_of_a_step(frame: FrameType | None) -> bool:
    """Return whether a measured step is among the callers, and no library's own business."""
    while frame is not None and not is_user_code_boundary(frame.f_code):
        if str(frame.f_globals.get("__name__")).startswith(OF_THEIR_OWN):
            return False
        frame = frame.f_back
    return frame is not None
