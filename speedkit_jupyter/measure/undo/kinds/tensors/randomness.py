"""Random generators that the user made; those of the process are in `process`."""

from __future__ import annotations

import copy
import random
import sys
from contextvars import ContextVar
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING, Copies, Kind


class Generators(Kind):
    """Python's, numpy's, torch's: their state, read and written in each one's own way."""

    def recognizes(self, cls: type) -> bool:
        """Each has its own base class; numpy's newer ones keep theirs in a bit generator."""
        return bool(_ways(cls))

    def children(self, instance: Any) -> Any:
        """The bit generator, which others may share, and what it was seeded by."""
        held = (getattr(instance, name, None) for name in ("bit_generator", "seed_seq"))
        return [part for part in held if part is not None]

    def copy(self, instance: Any, copies: Copies) -> Any:
        """Its state."""
        return copy.deepcopy(_read(instance))

    def same(self, instance: Any, memory: Any) -> bool:
        """States hold arrays and tensors."""
        return bool(_flat(_read(instance)) == _flat(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        """Of a copy, so that it can be put back again and again."""
        _, write = _ways(type(instance)) or ("", "")
        state = copy.deepcopy(memory)
        if write == "state":
            instance.state = state
        elif write:
            getattr(instance, write)(state)


def _read(generator: Any) -> Any:
    read, _ = _ways(type(generator)) or ("", "")
    return generator.state if read == "state" else getattr(generator, read)() if read else None


def _ways(cls: type) -> tuple[str, str] | tuple[()]:
    """How its state is read and written; nothing for what is no generator."""
    import torch

    if issubclass(cls, random.Random):
        return () if issubclass(cls, random.SystemRandom) else ("getstate", "setstate")
    if issubclass(cls, torch.Generator):
        return "get_state", "set_state"
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is None:
        return ()
    if issubclass(cls, numpy.RandomState):
        return "get_state", "set_state"
    if issubclass(cls, numpy.BitGenerator):
        return "state", "state"
    return ("", "") if issubclass(cls, numpy.Generator) else ()


def _flat(state: Any) -> Any:
    """States of arrays and tensors as something to compare."""
    if hasattr(state, "tobytes"):
        return state.tobytes()
    if hasattr(state, "numpy"):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: _flat(part) for key, part in state.items()}
    return tuple(map(_flat, state)) if isinstance(state, tuple | list) else state


def is_empty(variable: ContextVar[Any]) -> bool:
    """Whether it has no value here, and no default."""
    try:
        variable.get()
    except LookupError:
        return True
    return False


class ContextVariables(Kind):
    """The value that a context variable has here."""

    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Python's own."""
        return cls is ContextVar

    def children(self, instance: ContextVar[Any]) -> Any:
        """The value."""
        return [value for value in (instance.get(MISSING),) if value is not MISSING]

    def copy(self, instance: ContextVar[Any], copies: Copies) -> Any:
        """The value, or the default."""
        try:
            return instance.get()
        except LookupError:
            return MISSING

    def same(self, instance: ContextVar[Any], memory: Any) -> bool:
        """By identity."""
        return self.copy(instance, Copies()) is memory

    def put_back(self, instance: ContextVar[Any], memory: Any) -> None:
        """One that had none can only be given one."""
        if memory is MISSING:
            raise RuntimeError("a context variable that had no value can't lose it")
        instance.set(memory)
