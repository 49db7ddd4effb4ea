"""Random generators that the user made; those of the process are in `process`."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler


class Generators(StateHandler):
    """The state of Python's, NumPy's and torch's generators, read and written in each one's way."""

    def recognizes(self, cls: type) -> bool:
        return bool(_ways(cls))

    def children(self, instance: Any) -> Any:
        """Return the bit generator of NumPy's newer generators, which others may share."""
        part = getattr(instance, "bit_generator", None)
        return () if part is None else (part,)

    def copy(self, instance: Any, copies: Copies) -> Any:
        return copy.deepcopy(_read(instance))

    def same(self, instance: Any, memory: Any) -> bool:
        return bool(_flat(_read(instance)) == _flat(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        _, write = _ways(type(instance)) or ("", "")
        state = copy.deepcopy(memory)  # so that it can be put back again and again
        if write == "state":
            instance.state = state
        elif write:
            getattr(instance, write)(state)


def _read(generator: Any) -> Any:
    read, _ = _ways(type(generator)) or ("", "")
    return generator.state if read == "state" else getattr(generator, read)() if read else None


def _ways(cls: type) -> tuple[str, str] | tuple[()]:
    """Return how its state is read and written; nothing for a class of no generators."""
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
    """Return a state of arrays and tensors as something that compares."""
    if hasattr(state, "tobytes"):
        return state.tobytes()
    if hasattr(state, "numpy"):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: _flat(part) for key, part in state.items()}
    return tuple(map(_flat, state)) if isinstance(state, tuple | list) else state
