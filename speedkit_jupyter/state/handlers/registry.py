"""The table of handlers by class, for finding, copying and comparing."""

from __future__ import annotations

import datetime
import functools
import gc
import io
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, MappingView
from typing import Any

import torch

from speedkit_jupyter.state.handlers import containers
from speedkit_jupyter.state.handlers.base import StateHandler
from speedkit_jupyter.state.handlers.iterators import Iterators, Replay
from speedkit_jupyter.state.handlers.names import Cells, Functions, NamesHandler
from speedkit_jupyter.state.handlers.tensors import Gradients, Tensors
from speedkit_jupyter.state.handlers.values import Arrays, Buffers, Generators, Pictures
from speedkit_jupyter.state.ownership import (
    INNER_MODULES,
    is_elsewhere,
    is_machinery,
    is_the_users_function,
)
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.modules import script_constants

PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
LruCache = type(functools.lru_cache(None)(len))
POINTER_BYTES = object.__basicsize__ // 2


class Leading(StateHandler):
    """Instances that hold nothing which changes, and lead to others that may."""

    has_state = False

    def __init__(self, behind: Callable[[Any], Iterable[Any]], *types: type) -> None:
        self.types, self._behind = types, behind

    def children(self, instance: Any) -> Iterable[Any]:
        return [part for part in self._behind(instance) if part is not None]


def _views(view: Any) -> Iterable[Any]:
    """Return the dict behind a view; a class's own attributes are no dict that can be written."""
    return [d for d in gc.get_referents(view) if not (type(d) is dict and "__dict__" in d)]


def _bound(method: Any) -> Iterable[Any]:
    owner = getattr(method, "__self__", None)
    return getattr(method, "__func__", None), None if isinstance(owner, types.ModuleType) else owner


def _referents(reference: Any) -> Iterable[Any]:
    if type(reference) in PROXIES:  # a proxy gives its object away in a bound method
        return (reference.__reduce_ex__.__self__,)
    return (weakref.ref.__call__(reference),)


class Unknown(StateHandler):
    """Objects without another handler that are no plain values: a library's state in C."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        """Return whether it may change: a class that hashes by value does not."""
        own: Any = cls.__hash__
        return cls is not object and (own is None or own is object.__hash__)

    def is_unrestorable(self, instance: Any) -> bool:
        if is_a(instance, io.IOBase) and instance.closed:
            return False
        return instance is not sys.stdout and instance is not sys.stderr


class Caches(StateHandler):
    """`lru_cache`, whose entries can be cleared, and not put back. A library's is its own."""

    types = (LruCache,)
    has_state = False

    def is_unrestorable(self, instance: Any) -> bool:
        function = getattr(instance, "__wrapped__", None)
        return type(function) is types.FunctionType and is_the_users_function(function)


BOUND = (
    types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, staticmethod, classmethod,
)  # fmt: skip
# In the order in which they put back: what holds before what is held, gradients last.
HANDLERS: tuple[StateHandler, ...] = (
    NamesHandler(), Cells(), Functions(), containers.Definitions(), containers.Attributes(),
    containers.Slots(), containers.Dicts(), containers.Lists(), containers.Sets(),
    containers.Scripted(), Buffers(), Pictures(), Tensors(), Arrays(), Generators(), Iterators(),
    Leading(tuple.__iter__, tuple),
    Leading(frozenset.__iter__, frozenset),
    Leading(_views, MappingView, types.MappingProxyType),
    Leading(_bound, *BOUND),
    Leading(lambda p: (p.fget, p.fset, p.fdel), property),
    Leading(lambda p: (p.func, *p.args, p.keywords), functools.partial, functools.partialmethod),
    Leading(_referents, weakref.ref, *PROXIES),
    Leading(script_constants, torch.jit.ScriptFunction),
    Leading(lambda own: (vars(own),), threading.local),
    Caches(), Gradients(),
)  # fmt: skip
UNKNOWN, REPLAYED = Unknown(), Leading(lambda replay: (replay.original,), Replay)
# Plain values, which can't change.
ATOMS: frozenset[type] = frozenset(
    {
        int, float, complex, bool, str, bytes, range, object, types.NoneType, types.EllipsisType,
        types.NotImplementedType, types.CodeType, types.FrameType, types.TracebackType,
        types.GenericAlias, types.GetSetDescriptorType, types.MemberDescriptorType,
        types.WrapperDescriptorType, datetime.datetime, re.Pattern,
    }
)  # fmt: skip
# Objects in C of these packages hold no state of the user's.
INNER = frozenset(
    [
        "torch", "numpy", "builtins", "functools", "operator", "_operator", "_struct",
        "_abc", "_collections", "collections", "_ctypes", "pydantic_core", "weakref",
        "_multiprocessing",
    ]
)  # fmt: skip


def handlers_of(cls: type) -> tuple[StateHandler, ...]:
    """Return the handlers of a class's instances; none for plain values."""
    try:
        if cls in ATOMS:
            return ()
        handlers = tuple(handler for handler in HANDLERS if handler.recognizes(cls))
    except Exception:  # its metaclass compares or hashes in a way of its own
        return (UNKNOWN,)
    if issubclass(cls, Replay):
        return (REPLAYED,)
    alone = (NamesHandler, Iterators)
    if own := tuple(handler for handler in handlers if isinstance(handler, alone)):
        return own
    if is_elsewhere(cls):
        return (UNKNOWN,)
    if _is_left_alone(cls):
        return ()
    known = any(
        not isinstance(handler, containers.Attributes | containers.Slots) for handler in handlers
    )
    if known or str(cls.__module__).partition(".")[0] in INNER or not UNKNOWN.recognizes(cls):
        return handlers
    return (*handlers, UNKNOWN) if not handlers or _hides_memory(cls) else handlers


def _is_left_alone(cls: type) -> bool:
    """Return whether instances are part of a compiler, a shell or the like."""
    home = cls.__dict__.get("__module__", "builtins")
    if issubclass(cls, (type, threading.local)) or not is_machinery(home):
        return False
    kinds = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer)
    return not (INNER_MODULES.match(home) and issubclass(cls, kinds))


def _hides_memory(cls: type) -> bool:
    """Return whether an instance takes more bytes than its dictionary and slots do."""
    pointers = (
        len([*containers.slots(cls)]) + (cls.__weakrefoffset__ > 0) + (cls.__dictoffset__ > 0)
    )
    return cls.__basicsize__ > object.__basicsize__ + pointers * POINTER_BYTES
