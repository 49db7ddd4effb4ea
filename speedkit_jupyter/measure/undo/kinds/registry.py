"""The registry: which kinds an object is of. Finding, copying and comparing all ask it."""

from __future__ import annotations

import datetime
import re
from types import (
    CodeType,
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

from speedkit_jupyter.measure.undo.kinds.base import Kind
from speedkit_jupyter.measure.undo.kinds.code.names import Cells, Modules, Names, NamesKind
from speedkit_jupyter.measure.undo.kinds.files.mirrors import Loggers
from speedkit_jupyter.measure.undo.kinds.files.streams import Files, Iterators, Replaying, Texts
from speedkit_jupyter.measure.undo.kinds.objects.compared_only import Folders, Graphs, Seeds
from speedkit_jupyter.measure.undo.kinds.objects.containers import (
    Buffers,
    Dicts,
    Immutables,
    Lists,
    Sets,
)
from speedkit_jupyter.measure.undo.kinds.objects.displays import Images, Widgets
from speedkit_jupyter.measure.undo.kinds.objects.fields import Fields, Registered
from speedkit_jupyter.measure.undo.kinds.objects.functions import (
    Caches,
    Callables,
    Finalizers,
    Functions,
    Leading,
)
from speedkit_jupyter.measure.undo.kinds.objects.instances import Attributes, Classes, Slots
from speedkit_jupyter.measure.undo.kinds.objects.locks import Locals, Locks
from speedkit_jupyter.measure.undo.kinds.objects.opaque import (
    Reduced,
    Unknown,
    hides_memory,
    is_elsewhere,
    says_its_state,
)
from speedkit_jupyter.measure.undo.kinds.objects.weak import Weak
from speedkit_jupyter.measure.undo.kinds.origin import is_machinery
from speedkit_jupyter.measure.undo.kinds.tensors.arrays import Arrays, Frames
from speedkit_jupyter.measure.undo.kinds.tensors.memory import Mapped, Storages
from speedkit_jupyter.measure.undo.kinds.tensors.randomness import ContextVariables, Generators
from speedkit_jupyter.measure.undo.kinds.tensors.scripted import Scripted
from speedkit_jupyter.measure.undo.kinds.tensors.tensors import Gradients, Tensors

# In the order in which they are put back: what holds before what is held, gradients last.
KINDS: tuple[Kind, ...] = (
    NamesKind(), Cells(), Functions(), Classes(), Fields(), Registered(), Attributes(), Slots(),
    Scripted(), Dicts(), Lists(), Sets(), Immutables(), Callables(), Leading(),
    Finalizers(), Reduced(), Weak(), Modules(), Buffers(), Storages(), Tensors(), Arrays(),
    Frames(), Mapped(), Images(), Generators(), Seeds(), Widgets(), ContextVariables(), Texts(),
    Files(), Iterators(), Caches(), Locals(), Locks(), Graphs(), Loggers(), Folders(),
    Gradients(),
)  # fmt: skip
UNKNOWN, REPLAYING = Unknown(), Replaying()
REDUCED = next(kind for kind in KINDS if type(kind) is Reduced)
# Plain values, which can't change.
ATOMS: frozenset[type] = frozenset(
    {
        int, float, complex, bool, str, bytes, range, object, NoneType, EllipsisType,
        NotImplementedType, CodeType, FrameType, TracebackType, GenericAlias,
        GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType,
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
        try:
            kinds = self._known.get(cls)
            if kinds is None:
                kinds = self._known[cls] = _kinds(cls)
        except Exception:  # its metaclass compares or hashes in a way of its own
            return (UNKNOWN,)
        return kinds


def _kinds(cls: type) -> tuple[Kind, ...]:
    if cls is Names:
        return KINDS[:1]
    if REPLAYING.recognizes(cls):
        return (REPLAYING,)
    kinds = tuple(kind for kind in KINDS if kind.recognizes(cls))
    if any(type(kind) is Iterators for kind in kinds):
        return tuple(kind for kind in kinds if type(kind) is Iterators)
    if is_elsewhere(cls):
        return (UNKNOWN,)
    if is_machinery(cls) and not issubclass(cls, type):
        return tuple(kind for kind in kinds if kind.anywhere)
    if any(kind.knows_memory for kind in kinds) or _is_inner(cls):
        return kinds
    if not UNKNOWN.recognizes(cls) or (kinds and not hides_memory(cls)):
        return kinds
    return (*kinds, REDUCED if says_its_state(cls) else UNKNOWN)


# torch's own C++ objects, numpy's functions, Python's and pydantic's inner ones: nobody's state.
INNER = frozenset(
    [
        "torch", "numpy", "builtins", "functools", "operator", "_operator", "_struct",
        "_abc", "_collections", "collections", "_ctypes", "pydantic_core",
    ]
)  # fmt: skip


def _is_inner(cls: type) -> bool:
    home = cls.__module__ if isinstance(cls.__module__, str) else ""
    return home.partition(".")[0] in INNER
