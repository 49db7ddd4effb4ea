"""Values in C: NumPy's arrays, bytes, random generators."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterable
from typing import Any

from speedkit_jupyter.measure.undo.handlers.base import Copies, StateHandler


class Arrays(StateHandler):
    """Arrays of every class. Arrays of objects hold them as a list does."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
        return ndarray is not None and issubclass(cls, ndarray)

    def children(self, instance: Any) -> Iterable[Any]:
        return _bare(instance).ravel().tolist() if instance.dtype == object else ()

    def copy(self, instance: Any, copies: Copies) -> tuple[Any, Any]:
        """Return a copy, or None for an array that is too large, and how it lies."""
        plain = _bare(instance)
        if plain.dtype.hasobject and plain.dtype != object:
            raise TypeError("it holds objects in fields")
        fits = copies.fits(instance, plain.nbytes)
        return plain.copy(order="K") if fits else None, _header(plain)

    def same(self, instance: Any, memory: tuple[Any, Any]) -> bool:
        return bool(_header(instance) == memory[1]) and self.same_values(instance, memory)

    def same_values(self, instance: Any, memory: tuple[Any, Any]) -> bool:
        saved, plain = memory[0], _bare(instance)
        if saved is None:
            return True
        if plain.shape != saved.shape or plain.dtype != saved.dtype:
            return False
        if plain.dtype == object:
            return all(map(operator.is_, plain.ravel().tolist(), saved.ravel().tolist()))
        return bool((_bytes(plain) == _bytes(saved)).all())

    def put_back(self, instance: Any, memory: tuple[Any, Any]) -> None:
        """Write into its own memory."""
        import numpy as np

        saved, header = memory
        if _header(instance) != header:
            raise ValueError("its shape or dtype was changed in place")
        if saved is not None:
            np.copyto(_bare(instance), saved)


def _bare(array: Any) -> Any:
    """Return a view without what a subclass does."""
    import numpy as np

    return array.view(np.ndarray)


def _header(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides


def _bytes(plain: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8)


class Buffers(StateHandler):
    """The bytes of a `bytearray`."""

    types = (bytearray,)

    def copy(self, instance: bytearray, copies: Copies) -> bytes | None:
        return bytes(instance) if copies.fits(instance, len(instance)) else None

    def same(self, instance: bytearray, memory: bytes | None) -> bool:
        return memory is None or instance == memory

    def put_back(self, instance: bytearray, memory: bytes) -> None:
        """Write in place; raise BufferError if the size changed while a view is in use."""
        instance[:] = memory


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
