"""Which handlers an object has. Finding, copying and comparing all ask this."""

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

from speedkit_jupyter.measure.undo.handlers.arrays import Arrays
from speedkit_jupyter.measure.undo.handlers.base import StateHandler
from speedkit_jupyter.measure.undo.handlers.containers import (
    Dicts,
    Lists,
    Sets,
)
from speedkit_jupyter.measure.undo.handlers.instances import Attributes, Classes, Slots
from speedkit_jupyter.measure.undo.handlers.iterators import Files, Iterators, Replaying
from speedkit_jupyter.measure.undo.handlers.leading import LEADING, BitGenerators
from speedkit_jupyter.measure.undo.handlers.names import (
    Cells,
    Functions,
    Modules,
    Names,
    NamesHandler,
)
from speedkit_jupyter.measure.undo.handlers.opaque import (
    Caches,
    Unknown,
    hides_memory,
    is_elsewhere,
)
from speedkit_jupyter.measure.undo.handlers.origin import is_machinery
from speedkit_jupyter.measure.undo.handlers.tensors import Gradients, Tensors
from speedkit_jupyter.measure.undo.handlers.values import Buffers, Generators, Texts

# In the order in which they put back: what holds before what is held, gradients last.
HANDLERS: tuple[StateHandler, ...] = (
    NamesHandler(), Cells(), Functions(), Classes(), Attributes(), Slots(), Dicts(), Lists(),
    Sets(), *LEADING, BitGenerators(), Modules(), Buffers(), Tensors(), Arrays(), Generators(),
    Texts(), Files(), Iterators(), Caches(), Gradients(),
)  # fmt: skip
UNKNOWN, REPLAYING = Unknown(), Replaying()
# Plain values, which can't change.
ATOMS: frozenset[type] = frozenset(
    {
        int, float, complex, bool, str, bytes, range, object, NoneType, EllipsisType,
        NotImplementedType, CodeType, FrameType, TracebackType, GenericAlias,
        GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType,
        datetime.datetime, re.Pattern,
    }
)  # fmt: skip
# Objects in C of these packages hold no state of the user's.
INNER = frozenset(
    [
        "torch", "numpy", "builtins", "functools", "operator", "_operator", "_struct",
        "_abc", "_collections", "collections", "_ctypes", "pydantic_core", "weakref",
    ]
)  # fmt: skip


class Registry:
    """Remembers the handlers of each type that it has been asked about."""

    def __init__(self) -> None:
        self._known: dict[type, tuple[StateHandler, ...]] = dict.fromkeys(ATOMS, ())

    def of(self, cls: type) -> tuple[StateHandler, ...]:
        """Return the handlers of a class's instances; none for plain values."""
        try:
            handlers = self._known.get(cls)
            if handlers is None:
                handlers = self._known[cls] = _handlers(cls)
        except Exception:  # its metaclass compares or hashes in a way of its own
            return (UNKNOWN,)
        return handlers


def _handlers(cls: type) -> tuple[StateHandler, ...]:
    if cls is Names:
        return HANDLERS[:1]
    if REPLAYING.recognizes(cls):
        return (REPLAYING,)
    handlers = tuple(handler for handler in HANDLERS if handler.recognizes(cls))
    iterators = tuple(handler for handler in handlers if type(handler) is Iterators)
    if iterators:
        return iterators
    if is_elsewhere(cls):
        return (UNKNOWN,)
    if is_machinery(cls) and not issubclass(cls, type):
        return tuple(handler for handler in handlers if handler.anywhere)
    known = any(not isinstance(handler, Attributes | Slots) for handler in handlers)
    if known or str(cls.__module__).partition(".")[0] in INNER or not UNKNOWN.recognizes(cls):
        return handlers
    return (*handlers, UNKNOWN) if not handlers or hides_memory(cls) else handlers
