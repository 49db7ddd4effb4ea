"""Objects that mirror a file: what is in memory of it goes with the file, and not back alone.

An index that was put back would lead into a file that was not.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable, Iterator
from queue import Queue, SimpleQueue
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Kind, attribute_dict
from speedkit_jupyter.measure.undo.kinds.files.streams import Files
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_class
from speedkit_jupyter.support.lookup import is_a

# Those that open their file by its name, each time or in C.
BY_NAME = frozenset(
    [
        "dbm.dumb._Database", "mailbox.Mailbox", "h5py._hl.base.HLObject",
        "torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.writer.SummaryWriter",
        "pandas.io.pytables.HDFStore", "pandas.io.excel._base.ExcelWriter", "zarr.core.group.Group",
        "diskcache.core.Cache", "tinydb.database.TinyDB",
    ]
)  # fmt: skip
# Those that compress keep half of what they write, in memory too.
COMPRESSING = frozenset(["gzip.GzipFile", "bz2.BZ2File", "lzma.LZMAFile"])
FILES = Files()


def mirrors_a_file(instance: Any) -> bool:
    """Whether a library's object is about a file that is written to, and knows what is in it."""
    cls = type(instance)
    names = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    if names & BY_NAME:
        return True
    if names & COMPRESSING:
        return bool(FILES.beyond(instance))
    if is_the_users_class(cls) or _trains(cls):
        return False
    held = list((attribute_dict(instance) or {}).items())
    if "shelve.Shelf" in names:
        return any(name == "dict" and type(value) is not dict for name, value in held)
    return any(_is_written(value) for _, value in held)


def _is_written(value: Any) -> bool:
    if is_a(value, _connections()):
        return True
    in_memory = is_a(value, io.StringIO | io.BytesIO)
    return is_a(value, io.IOBase) and not in_memory and bool(FILES.beyond(value))


def _connections() -> tuple[type, ...]:
    """Where the user has loaded sqlite3."""
    connection = getattr(sys.modules.get("sqlite3"), "Connection", None)
    return () if connection is None else (connection,)


def _trains(cls: type) -> bool:
    import torch

    return issubclass(cls, torch.nn.Module | torch.optim.Optimizer)


class Loggers(Kind):
    """Loggers, whose handlers may write files. What is printed is printed."""

    has_state = False
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """And what stands before one."""
        return issubclass(cls, logging.Logger | logging.LoggerAdapter)

    def beyond(self, instance: Any) -> str:
        """Where a handler of its own, or of those that it passes on to, has a file."""
        has_file = any(is_a(handler, logging.FileHandler) for handler in _handlers(instance))
        return "writes to a file" if has_file else ""

    def children(self, instance: Any) -> Iterable[Any]:
        """What these handlers collect in memory."""
        return [kept for handler in _handlers(instance) for kept in _collected(handler)]


def _handlers(logger: Any) -> Iterator[logging.Handler]:
    """Its own, and those of the loggers that it passes on to."""
    while is_a(logger, logging.LoggerAdapter):
        logger = logger.logger
    while is_a(logger, logging.Logger):
        yield from list(logger.handlers)
        logger = logger.parent if logger.propagate else None


def _collected(handler: logging.Handler) -> Iterator[Any]:
    """A handler of the user's as it is; of Python's the list, queue or text that it fills."""
    if is_the_users_class(type(handler)):
        yield handler
    attributes = attribute_dict(handler) or {}
    for name in ("buffer", "queue", "stream"):
        if is_a(kept := attributes.get(name), list | SimpleQueue | Queue | io.StringIO):
            yield kept
