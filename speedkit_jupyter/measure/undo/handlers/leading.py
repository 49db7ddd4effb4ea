"""Objects that hold nothing of their own that changes, and lead to others that may."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, MappingView
from types import (
    BuiltinFunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import StateHandler

PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


class Leading(StateHandler):
    """Instances of some types, and the function that gives what lies behind one."""

    has_state = False

    def __init__(self, types: Any, behind: Callable[[Any], Iterable[Any]]) -> None:
        self._types, self._behind = types, behind
        self.anywhere = types is WEAK

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, self._types)

    def children(self, instance: Any) -> Iterable[Any]:
        return [part for part in self._behind(instance) if part is not None]


def _views(view: Any) -> Iterable[Any]:
    """Return the dict behind a view; a class's own attributes are no dict that can be written."""
    return [d for d in gc.get_referents(view) if not (type(d) is dict and "__dict__" in d)]


def _bound(method: Any) -> Iterable[Any]:
    owner = getattr(method, "__self__", None)
    return getattr(method, "__func__", None), None if isinstance(owner, ModuleType) else owner


def _referents(reference: Any) -> Iterable[Any]:
    if type(reference) in PROXIES:  # a proxy gives its object away in a bound method
        return (reference.__reduce_ex__.__self__,)
    return (weakref.ref.__call__(reference),)


METHODS = (MethodType, BuiltinFunctionType, MethodWrapperType, staticmethod, classmethod)
WEAK = (weakref.ref, *PROXIES)
LEADING: tuple[StateHandler, ...] = (
    Leading(tuple, tuple.__iter__),
    Leading(frozenset, frozenset.__iter__),
    Leading((MappingView, MappingProxyType), _views),
    Leading(METHODS, _bound),
    Leading(property, lambda p: (p.fget, p.fset, p.fdel)),
    Leading((functools.partial, functools.partialmethod), lambda p: (p.func, *p.args, p.keywords)),
    Leading(WEAK, _referents),
)


class BitGenerators(StateHandler):
    """NumPy's newer generators lead to a bit generator, which others may share."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        generator = getattr(sys.modules.get("numpy.random"), "Generator", None)
        return generator is not None and issubclass(cls, generator)

    def children(self, instance: Any) -> Iterable[Any]:
        return (instance.bit_generator,)
