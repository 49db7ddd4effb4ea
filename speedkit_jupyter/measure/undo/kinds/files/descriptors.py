"""File descriptors that code uses as numbers: where each stands, and what waits in a pipe."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.code.spelled import Words
from speedkit_jupyter.measure.undo.kinds.settings import CHANGED

# What code names that works on them; all in `os`.
CALLS = frozenset(
    [
        "open", "close", "read", "write", "pread", "pwrite", "lseek", "pipe", "dup", "dup2",
        "ftruncate", "sendfile", "readv", "writev", "openpty", "memfd_create",
    ]
)  # fmt: skip
MOST = 4096
# How long the value of a pipe is: a file's says more.
FIFO = 2


class Descriptors:
    """Those of files and pipes, where the user's code works on some.

    Python's own file objects that are reached are another kind, and move theirs in their own way.
    """

    def __init__(self, objects: Collection[Any], words: Words) -> None:
        by_name = "os" in words.named and not CALLS.isdisjoint(words.named)
        self._watched = by_name or any(map(_works_on_some, objects))
        self._others = (
            {1, 2, *(n for instance in objects for n in _number(instance))}
            if self._watched
            else set()
        )
        self._saved = self._read() if self._watched else {}

    def restore(self) -> Iterator[tuple[str, str]]:
        """Files stand where they stood; gives the numbers of what can't be put back, and why."""
        now = self._read() if self._watched else {}
        for number in sorted(now.keys() | self._saved.keys()):
            value, saved = now.get(number), self._saved.get(number)
            if value == saved:
                continue
            if value and saved and value[0] == saved[0] and len(saved) > FIFO:
                os.lseek(number, saved[1], os.SEEK_SET)
                value = _value(number)
            if value != saved:
                yield f"file descriptor {number}", CHANGED

    def _read(self) -> dict[int, Any]:
        taken = {_file(number) for number in self._others}
        values = {number: _value(number) for number in range(MOST) if number not in self._others}
        return {
            n: value for n, value in values.items() if value is not None and value[0] not in taken
        }


def _works_on_some(instance: Any) -> bool:
    """A function of `os` that code knows by a name of its own."""
    if type(instance) is not BuiltinFunctionType or instance.__name__ not in CALLS:
        return False
    return getattr(os, instance.__name__, None) is instance


def _number(instance: Any) -> Iterator[int]:
    if isinstance(instance, io.IOBase):
        try:
            yield instance.fileno()
        except (OSError, ValueError):  # in memory, or closed
            return


def _file(number: int) -> Any:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _value(number: int) -> Any:
    """Which file and where in it, or how many bytes wait; nothing for sockets and the like."""
    try:
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode):
            position = os.lseek(number, 0, os.SEEK_CUR)
            return (status.st_dev, status.st_ino), position, status.st_size, status.st_mtime_ns
        if stat.S_ISFIFO(status.st_mode):
            return (status.st_dev, status.st_ino), _waiting(number)
    except OSError:
        pass
    return None


def _waiting(number: int) -> int:
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(number, termios.FIONREAD, count)
    return count[0]
