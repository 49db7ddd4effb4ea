"""State that one function reads and another writes: random generators, buffers, texts."""

from __future__ import annotations

import array
import copy
import io
import random
import sys
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler


class Generators(StateHandler):
    """The state of Python's, NumPy's and torch's generators."""

    # Module, class, and the methods that read and write; one name stands for an attribute.
    WAYS = (
        ("random", "Random", "getstate", "setstate"),
        ("torch", "Generator", "get_state", "set_state"),
        ("numpy.random", "RandomState", "get_state", "set_state"),
        ("numpy.random", "BitGenerator", "state", "state"),
    )

    def recognizes(self, cls: type) -> bool:
        return self._way(cls) is not None and not issubclass(cls, random.SystemRandom)

    def copy(self, instance: Any, copies: Copies) -> Any:
        read, write = self._way(type(instance)) or ("", "")
        state = getattr(instance, read)
        return copy.deepcopy(state if read == write else state())

    def same(self, instance: Any, memory: Any) -> bool:
        return bool(_plain(self.copy(instance, Copies())) == _plain(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        read, write = self._way(type(instance)) or ("", "")
        state = copy.deepcopy(memory)  # so that it can be put back again and again
        if read == write:
            setattr(instance, write, state)
        else:
            getattr(instance, write)(state)

    def _way(self, cls: type) -> tuple[str, str] | None:
        for module, name, read, write in self.WAYS:
            found = getattr(sys.modules.get(module), name, None)
            if found is not None and issubclass(cls, found):
                return read, write
        return None


def _plain(state: Any) -> Any:
    """Return a state of arrays and tensors as something that compares."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(part) for key, part in state.items()}
    return tuple(map(_plain, state)) if isinstance(state, tuple | list) else state


class Buffers(StateHandler):
    """The values of a `bytearray` or an `array.array`."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, bytearray | array.array)

    def copy(self, instance: Any, copies: Copies) -> Any:
        return instance[:] if copies.fits(instance, memoryview(instance).nbytes) else None

    def same(self, instance: Any, memory: Any) -> bool:
        return memory is None or bytes(memoryview(instance)) == bytes(memoryview(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        """Write in place; raise BufferError if the size changed while a view is in use."""
        if len(instance) == len(memory):
            memoryview(instance).cast("B")[:] = memoryview(memory).cast("B")
        else:
            instance[:] = memory


class Texts(StateHandler):
    """The contents and position of a `StringIO` or `BytesIO`."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, io.StringIO | io.BytesIO)

    def copy(self, instance: Any, copies: Copies) -> Any:
        return None if instance.closed else (instance.getvalue(), instance.tell())

    def same(self, instance: Any, memory: Any) -> bool:
        return bool(self.copy(instance, Copies()) == memory)

    def put_back(self, instance: Any, memory: Any) -> None:
        """Write it anew; raise ValueError if the step closed it."""
        value, position = memory
        instance.seek(0)
        instance.truncate()
        instance.write(value)
        instance.seek(position)
