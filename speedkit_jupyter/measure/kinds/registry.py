"""The registry: which kinds an object is of. Finding, copying and comparing all ask it."""

from __future__ import annotations

import datetime
import re
import weakref
from types import (
    CodeType,
    CoroutineType,
    EllipsisType,
    FrameType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    NoneType,
    NotImplementedType,
    TracebackType,
    WrapperDescriptorType,
)

from speedkit_jupyter.measure.kinds.arrays import Arrays, Frames, Mapped
from speedkit_jupyter.measure.kinds.base import Kind
from speedkit_jupyter.measure.kinds.containers import Buffers, Dicts, Immutables, Lists, Sets
from speedkit_jupyter.measure.kinds.functions import Caches, Callables, Functions
from speedkit_jupyter.measure.kinds.instances import Attributes, Classes, Slots
from speedkit_jupyter.measure.kinds.names import Cells, Modules, Names, NamesKind
from speedkit_jupyter.measure.kinds.origin import is_machinery
from speedkit_jupyter.measure.kinds.randomness import ContextVariables, Generators
from speedkit_jupyter.measure.kinds.scripted import Scripted
from speedkit_jupyter.measure.kinds.streams import Files, Iterators, Replaying, Texts, Unknown
from speedkit_jupyter.measure.kinds.tensors import Gradients, Tensors

# In the order in which they are put back: what holds before what is held, gradients last.
KINDS: tuple[Kind, ...] = (
    NamesKind(), Cells(), Functions(), Classes(), Attributes(), Slots(), Scripted(), Dicts(),
    Lists(), Sets(),
    Immutables(), Callables(), Modules(), Buffers(), Tensors(), Arrays(), Frames(), Mapped(),
    Generators(), ContextVariables(), Texts(), Files(), Iterators(), Caches(), Gradients(),
)  # fmt: skip
UNKNOWN, REPLAYING = Unknown(), Replaying()
# Plain values, which can't change.
ATOMS: frozenset[type] = frozenset(
    {
        int, float, complex, bool, str, bytes, range, slice, object, NoneType, EllipsisType,
        NotImplementedType, CodeType, CoroutineType, FrameType, TracebackType, GenericAlias,
        GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType, weakref.ref,
        datetime.datetime, re.Pattern,
    }
)  # fmt: skip
NOTHING: tuple[Kind, ...] = ()


class Registry:
    """Knows the kinds of each type that it has been asked about."""

    def __init__(self) -> None:
        self._known: dict[type, tuple[Kind, ...]] = dict.fromkeys(ATOMS, NOTHING)

    def of(self, cls: type) -> tuple[Kind, ...]:
        """The kinds that instances of a class are of; none for plain values."""
        kinds = self._known.get(cls)
        if kinds is None:
            kinds = self._known[cls] = _kinds(cls)
        return kinds


def _kinds(cls: type) -> tuple[Kind, ...]:
    if cls is Names:
        return KINDS[:1]
    if REPLAYING.recognizes(cls):
        return (REPLAYING,)
    found = tuple(kind for kind in KINDS if kind.recognizes(cls))
    if any(type(kind) is Iterators for kind in found):
        return tuple(kind for kind in found if type(kind) is Iterators)
    if is_machinery(cls):
        return tuple(kind for kind in found if type(kind) in (Modules, ContextVariables))
    if found or _is_inner(cls) or not UNKNOWN.recognizes(cls):
        return found
    return (UNKNOWN,)


# torch's own C++ objects, numpy's functions and Python's inner ones: nobody's state.
INNER = frozenset(
    [
        "torch", "numpy", "builtins", "functools", "operator", "_operator", "_struct",
        "_abc",
    ]
)  # fmt: skip


def _is_inner(cls: type) -> bool:
    home = cls.__module__ if isinstance(cls.__module__, str) else ""
    return home.partition(".")[0] in INNER
