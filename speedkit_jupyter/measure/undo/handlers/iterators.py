"""Iterators and files: what is drawn from or read on."""

from __future__ import annotations

import gc
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler
from speedkit_jupyter.measure.undo.handlers.names import Names, global_names
from speedkit_jupyter.measure.undo.handlers.origin import is_installed

# Iterators of Python's own tell only the garbage collector what they hold.
KEPT_IN_C = ("builtins", "itertools")


class Iterators(StateHandler):
    """What can't go back, but whose draws can be given again (`Replays`).

    These are generators, iterators written in C, and a loader's that has worker processes.
    """

    def recognizes(self, cls: type) -> bool:
        has_workers = cls.__name__ == "_MultiProcessingDataLoaderIter"
        if issubclass(cls, GeneratorType) or has_workers or hasattr(cls, "resumes"):
            return True
        if not issubclass(cls, Iterator) or issubclass(cls, io.IOBase):
            return False
        return cls.__dictoffset__ == 0 and "__slots__" not in vars(cls)

    def children(self, instance: Any) -> Iterable[Any]:
        """Return what a generator of the user's works on, and what one in C calls and gives out."""
        if not isinstance(instance, GeneratorType):
            if type(instance).__module__ in KEPT_IN_C:
                yield from _behind(instance)
            return
        frame = instance.gi_frame
        if frame is None or is_installed(str(frame.f_globals.get("__name__")).partition(".")[0]):
            return
        yield from frame.f_locals.values()
        yield Names(frame.f_globals, global_names(instance.gi_code)[0])


def _behind(iterator: Any) -> Iterator[Any]:
    """Yield all that it holds but other iterators, which this one draws from."""
    own = (tuple, list) if type(iterator) is itertools.cycle else (tuple,)
    for referent in gc.get_referents(iterator):
        parts = referent if type(referent) in own else (referent,)
        yield from (part for part in parts if not issubclass(type(part), Iterator))


class Replaying(StateHandler):
    """Ours, in place of an iterator while a step is measured."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        return hasattr(cls, "replays")

    def children(self, instance: Any) -> Iterable[Any]:
        return () if isinstance(instance._source, GeneratorType) else (instance._source,)


class Files(StateHandler):
    """The position of a file that is read. A file that can be written can't be put back."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, io.IOBase) and not issubclass(cls, io.StringIO | io.BytesIO)

    def copy(self, instance: Any, copies: Copies) -> int | None:
        try:
            if instance.closed or self.is_unrestorable(instance):
                return None
            return int(instance.tell())
        except (OSError, ValueError):  # in the middle of a loop over its lines
            return None

    def same(self, instance: Any, memory: int | None) -> bool:
        return memory is None or (not instance.closed and instance.tell() == memory)

    def put_back(self, instance: Any, memory: int) -> None:
        """Seek; raise ValueError if the step closed it."""
        instance.seek(memory)

    def is_unrestorable(self, instance: Any) -> bool:
        """Return whether it can be written, or read only once. Standard streams are left alone."""
        streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
        if any(instance in (s, getattr(s, "buffer", s)) for s in streams):
            return False
        try:
            return not instance.closed and (instance.writable() or not instance.seekable())
        except (OSError, ValueError, AttributeError):
            return False
