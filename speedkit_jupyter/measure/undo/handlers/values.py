"""State that one function reads and another writes: random generators and files."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler


class Generators(StateHandler):
    """The state of Python's, NumPy's and torch's generators."""

    # Module, class, attribute that holds the generator, and what reads and writes it: two methods
    # or one attribute.
    WAYS = (
        ("random", "Random", "", "getstate", "setstate"),
        ("torch", "Generator", "", "get_state", "set_state"),
        ("numpy.random", "RandomState", "", "get_state", "set_state"),
        ("numpy.random", "BitGenerator", "", "state", "state"),
        ("numpy.random", "Generator", "bit_generator", "state", "state"),
    )

    def recognizes(self, cls: type) -> bool:
        return self._way(cls) is not None and not issubclass(cls, random.SystemRandom)

    def copy(self, instance: Any, copies: Copies) -> Any:
        holder, read, write = self._way(type(instance)) or ("", "", "")
        state = getattr(getattr(instance, holder) if holder else instance, read)
        return state if read == write else state()

    def same(self, instance: Any, memory: Any) -> bool:
        return bool(_plain(self.copy(instance, Copies())) == _plain(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        holder, read, write = self._way(type(instance)) or ("", "", "")
        generator = getattr(instance, holder) if holder else instance
        if read == write:
            setattr(generator, write, memory)
        else:
            getattr(generator, write)(memory)

    def _way(self, cls: type) -> tuple[str, str, str] | None:
        for module, name, *way in self.WAYS:
            found = getattr(sys.modules.get(module), name, None)
            if found is not None and issubclass(cls, found):
                return way[0], way[1], way[2]
        return None


def _plain(state: Any) -> Any:
    """Return a state of arrays and tensors as something that compares."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(part) for key, part in state.items()}
    return tuple(map(_plain, state)) if isinstance(state, tuple | list) else state


class Files(StateHandler):
    """The contents of files in memory, and the position of those that are read."""

    def recognizes(self, cls: type) -> bool:
        return issubclass(cls, io.IOBase)

    def copy(self, instance: Any, copies: Copies) -> tuple[Any, int] | None:
        if instance.closed or not instance.seekable() or self.is_unrestorable(instance):
            return None
        is_in_memory = isinstance(instance, io.StringIO | io.BytesIO)
        return instance.getvalue() if is_in_memory else None, instance.tell()

    def same(self, instance: Any, memory: tuple[Any, int] | None) -> bool:
        return memory is None or bool(self.copy(instance, Copies()) == memory)

    def put_back(self, instance: Any, memory: tuple[Any, int]) -> None:
        """Write it anew; raise ValueError if the step closed it."""
        value, position = memory
        if value is not None:
            instance.seek(0)
            instance.truncate()
            instance.write(value)
        instance.seek(position)

    def is_unrestorable(self, instance: Any) -> bool:
        """Return whether it can be written, and is neither in memory nor a standard stream."""
        left_alone = (sys.stdin, sys.stdout, sys.stderr)
        if isinstance(instance, io.StringIO | io.BytesIO) or instance in left_alone:
            return False
        return not instance.closed and bool(instance.writable())
