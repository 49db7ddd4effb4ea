"""Files and iterators."""

from __future__ import annotations

import gc
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind
from speedkit_jupyter.measure.undo.kinds.code.names import Names, global_names
from speedkit_jupyter.measure.undo.kinds.objects.weak import PROXIES
from speedkit_jupyter.measure.undo.kinds.origin import is_installed

# Iterators of Python's own, which say what they hold to the garbage collector only.
KEPT_IN_C = ("builtins", "itertools")


class Texts(Kind):
    """Files in memory: what is in them, and the position."""

    def recognizes(self, cls: type) -> bool:
        """`StringIO` and `BytesIO`."""
        return issubclass(cls, io.StringIO | io.BytesIO)

    def copy(self, instance: Any, copies: Copies) -> Any:
        """None of one that is closed."""
        return None if instance.closed else (instance.getvalue(), instance.tell())

    def same(self, instance: Any, memory: Any) -> bool:
        """By value."""
        return bool(self.copy(instance, Copies()) == memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """Raises ValueError where it was closed."""
        value, position = memory
        instance.seek(0)
        instance.truncate()
        instance.write(value)
        instance.seek(position)


class Files(Kind):
    """Files: where one that is read stands. What is written is written."""

    def recognizes(self, cls: type) -> bool:
        """Python's own and those of the standard library."""
        return issubclass(cls, io.IOBase) and not issubclass(cls, io.StringIO | io.BytesIO)

    def copy(self, instance: Any, copies: Copies) -> int | None:
        """The position, where there is one."""
        try:
            return None if self.beyond(instance) or instance.closed else int(instance.tell())
        except (OSError, ValueError):  # in the middle of a loop over its lines
            return None

    def same(self, instance: Any, memory: int | None) -> bool:
        """The position."""
        return memory is None or (not instance.closed and instance.tell() == memory)

    def put_back(self, instance: Any, memory: int) -> None:
        """Raises ValueError where it was closed."""
        instance.seek(memory)

    def beyond(self, instance: Any) -> str:
        """Where it can be written, or read only once. What is printed is printed."""
        try:
            if instance.closed or _is_standard(instance):
                return ""
            return (
                "is written to for real" if instance.writable() or not instance.seekable() else ""
            )
        except (OSError, ValueError, AttributeError):
            return ""


class Iterators(Kind):
    """What is drawn from: it can't go back, but what was drawn can be given again (`Replays`)."""

    def recognizes(self, cls: type) -> bool:
        """Generators, iterators that are kept in C, a loader's that has processes of its own."""
        if issubclass(cls, GeneratorType) or _has_workers(cls) or hasattr(cls, "resumes"):
            return True
        if not issubclass(cls, Iterator) or issubclass(cls, io.IOBase) or cls in PROXIES:
            return False
        return cls.__dictoffset__ == 0 and "__slots__" not in cls.__dict__

    def children(self, instance: Any) -> Iterable[Any]:
        """What a generator of the user's works on, what one in C calls and gives out."""
        is_a_generator = isinstance(instance, GeneratorType)
        if type(instance).__module__ in KEPT_IN_C and not is_a_generator:
            yield from _behind(instance)
        if (owner := epoch_of(instance)) is not None and has_not_begun(instance):
            yield owner  # whose next epoch follows from how it stands
        frame = instance.gi_frame if is_a_generator else None
        if frame is None or is_installed(str(frame.f_globals.get("__name__")).partition(".")[0]):
            return
        yield from frame.f_locals.values()
        yield Names(frame.f_globals, global_names(instance.gi_code)[0])

    def beyond(self, instance: Any) -> str:
        """Unless what holds it holds a replaying one for a while."""
        return "is drawn from for real"


def epoch_of(iterator: Any) -> Any:
    """What has made a generator by its own `__iter__`: a loader of any library, or of the user's;
    None for all else.
    """
    frame = iterator.gi_frame if type(iterator) is GeneratorType else None
    if frame is None or frame.f_code.co_argcount != 1:
        return None
    owner = frame.f_locals.get(frame.f_code.co_varnames[0])
    begin = getattr(type(owner), "__iter__", None)
    return owner if getattr(begin, "__code__", None) is frame.f_code else None


def has_not_begun(iterator: Any) -> bool:
    """Whether none of a generator's code has run."""
    return type(iterator) is GeneratorType and getgeneratorstate(iterator) == GEN_CREATED


def _behind(iterator: Any) -> Iterator[Any]:
    """All but other iterators, which this one draws from."""
    own = (tuple, list) if type(iterator) is itertools.cycle else (tuple,)
    for referent in gc.get_referents(iterator):
        parts = referent if type(referent) in own else (referent,)
        yield from (part for part in parts if not issubclass(type(part), Iterator))


class Replaying(Kind):
    """Ours, in the place of an iterator while a benchmark runs."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """It says so."""
        return hasattr(cls, "replays")

    def children(self, instance: Any) -> Iterable[Any]:
        """Where it draws from: an object's attributes are put back."""
        owner = vars(instance).get("_owner")
        if owner is not None:
            return (owner,)
        return () if isinstance(instance._source, GeneratorType) else (instance._source,)


def _is_standard(file: Any) -> bool:
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return any(file is stream or file is getattr(stream, "buffer", stream) for stream in streams)


def _has_workers(cls: type) -> bool:
    return cls.__name__ == "_MultiProcessingDataLoaderIter"


# Iterators that only count: they are data of nobody's.
COUNTERS: tuple[type, ...] = (itertools.count,)
