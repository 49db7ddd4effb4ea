"""Name what a step starts or writes outside the process, by Python's audit events."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from speedkit_jupyter.state.output import calling_step
from speedkit_jupyter.state.ownership import is_installed
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.dynamo import COMPILERS

# What an event does, by its name: {0} is the event's first argument, {1} its name.
FILES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "sqlite3.connect",
)  # fmt: skip
PROCESSES = (
    "subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec",
)  # fmt: skip
SOCKETS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
EVENTS = dict.fromkeys(FILES, "changes the file {0} ({1})")
EVENTS |= dict.fromkeys(PROCESSES, "starts a process ({1})")
EVENTS |= dict.fromkeys(SOCKETS, "uses a socket ({1})")
EVENTS["import"] = "imports {0} for the first time"
EVENTS |= {"_thread.start_new_thread": "starts a thread", "open": "opens the file {0} for writing"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Code that writes caches and starts helpers of its own: imports, compilers, workers of loaders.
OF_THEIR_OWN = (
    "importlib", "_frozen_importlib", *COMPILERS,
    "torch.utils.data", "torch.utils.cpp_extension", "triton", "tqdm", "ctypes", "linecache",
    "matplotlib",
)  # fmt: skip
# A line such as `!rm log` is the user's, and files that IPython writes are not.
IPYTHON = ("IPython", "ipykernel")
# One measurement at a time listens; an audit hook can't be removed from a process.
_LISTENERS: list[Callable[[str, tuple[Any, ...]], None]] = []


@cache
def _install() -> None:
    def hear(event: str, given: tuple[Any, ...]) -> None:
        if _LISTENERS and event in EVENTS:
            _LISTENERS[-1](event, given)

    sys.addaudithook(hear)


@contextmanager
def named(say: Callable[[list[str]], None]) -> Iterator[None]:
    """Call `say` with a line for each thing that steps in this thread are about to do for good.

    An error raised in there prevents it.
    """
    here, busy = (os.getpid(), threading.get_ident()), False

    def listen(event: str, given: tuple[Any, ...]) -> None:
        nonlocal busy
        is_here = (os.getpid(), threading.get_ident()) == here  # and not in a fork
        what = _what(event, given) if is_here and not busy else None
        libraries = OF_THEIR_OWN if event in PROCESSES else (*OF_THEIR_OWN, *IPYTHON)
        if what is not None and calling_step(libraries) is not None:
            busy = True
            try:
                say([f"the step {what}: that can't be put back"])
            finally:
                busy = False

    _install()
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
