"""Objects that some library keeps in C: what they say of themselves, or that nothing is known."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from types import AsyncGeneratorType, CoroutineType, MemberDescriptorType
from typing import Any, NamedTuple

from speedkit_jupyter.measure.undo.kinds.base import Copies, Kind

# What runs elsewhere, has another end, or can't be begun again: module and class.
ELSEWHERE = (
    "concurrent.futures.", "multiprocessing.queues", "multiprocessing.managers",
    "multiprocessing.connection", "multiprocessing.pool", "_asyncio.", "torch.library.",
    "subprocess.Popen.", "os._wrap_close.", "asyncio.subprocess.", "asyncio.streams.",
    "http.client.HTTPConnection.", "http.client.HTTPSConnection.", "smtplib.SMTP", "ftplib.FTP",
    "imaplib.IMAP4", "poplib.POP3", "xmlrpc.client.ServerProxy.", "requests.sessions.Session.",
    "httpx.", "aiohttp.client.", "websockets.", "serial.",
)  # fmt: skip
# To say what they hold takes too long.
TOO_DEAR = ("tokenizers",)
POINTER_BYTES = object.__basicsize__ // 2


class Reduced(Kind):
    """What can be pickled and takes its state back: partial objects, elements of a tree."""

    def recognizes(self, cls: type) -> bool:
        """Partial objects by themselves; others where nothing else is known (`says_its_state`)."""
        return issubclass(cls, functools.partial)

    def children(self, instance: Any) -> Iterable[Any]:
        """All that the state consists of."""
        return list(_leaves(_state(instance)))

    def copy(self, instance: Any, copies: Copies) -> Any:
        """As it would be pickled."""
        return _state(instance)

    def same(self, instance: Any, memory: Any) -> bool:
        """Objects by identity, plain values by value."""
        return _alike(_state(instance), memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """As it would be loaded."""
        instance.__setstate__(_loaded(memory))


class _Itself(NamedTuple):
    """A container that the object holds, which has a memory of its own: a partial's list."""

    found: Any


def _state(instance: Any) -> Any:
    """What is made anew for each pickle is taken apart; what is the same each time is held."""
    state, again = instance.__reduce_ex__(4), instance.__reduce_ex__(4)
    has_one = isinstance(state, tuple) and len(state) > 2
    return _taken_apart(state[2], again[2]) if has_one else None


def _taken_apart(state: Any, again: Any) -> Any:
    cls = type(state)
    if cls not in (list, tuple, dict):
        return state
    if state is again:
        return state if state == () else _Itself(state)
    if cls is dict:
        return {key: _taken_apart(value, again.get(key)) for key, value in state.items()}
    return cls(map(_taken_apart, state, again))


def _loaded(state: Any) -> Any:
    if type(state) is _Itself:
        return state.found
    if type(state) in {list, tuple}:
        return type(state)(map(_loaded, state))
    return {key: _loaded(value) for key, value in state.items()} if type(state) is dict else state


def _leaves(state: Any) -> Iterable[Any]:
    if type(state) is _Itself:
        yield state.found
    elif type(state) in {list, tuple}:
        for part in state:
            yield from _leaves(part)
    elif type(state) is dict:
        for part in state.values():
            yield from _leaves(part)
    else:
        yield state


def _alike(now: Any, saved: Any) -> bool:
    if type(now) is not type(saved):
        return False
    if type(now) is _Itself:
        return now.found is saved.found
    if type(now) in {list, tuple}:
        return len(now) == len(saved) and all(map(_alike, now, saved))
    if type(now) is dict:
        return now.keys() == saved.keys() and all(_alike(now[key], saved[key]) for key in now)
    return now is saved or (type(now) in {int, float, str, bytes, bool} and now == saved)


class Unknown(Kind):
    """What no other kind recognizes, and is no plain value: kept in C by some library."""

    def recognizes(self, cls: type) -> bool:
        """Hashed by what it is: then it may change. What is hashed by its value does not."""
        own: Any = cls.__hash__
        return cls is not object and (own is None or own is object.__hash__)

    def beyond(self, instance: Any) -> str:
        """Always."""
        return "is not known"


def says_its_state(cls: type) -> bool:
    """Whether it has its own ways to say what it holds, and to take it back."""
    if cls.__module__.startswith(TOO_DEAR) or not hasattr(cls, "__setstate__"):
        return False
    ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(cls, way, None) is not getattr(object, way, None) for way in ways)


def hides_memory(cls: type) -> bool:
    """Whether an instance takes more bytes than its dictionary and slots do."""
    slots = sum(
        isinstance(slot, MemberDescriptorType)
        for base in cls.__mro__
        if "__slots__" in base.__dict__
        for slot in base.__dict__.values()
    )
    pointers = slots + (cls.__weakrefoffset__ > 0) + (cls.__dictoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + pointers * POINTER_BYTES


def is_elsewhere(cls: type) -> bool:
    """Whether it is never looked into, but said."""
    if cls in (CoroutineType, AsyncGeneratorType):
        return True
    if issubclass(cls, (ctypes.CDLL, vars(ctypes)["_CFuncPtr"])):  # nobody knows what C code does
        return True
    if issubclass(cls, BaseProcess) and str(cls.__module__).startswith("multiprocessing."):
        return True
    return f"{cls.__module__}.{cls.__qualname__}.".startswith(ELSEWHERE)
