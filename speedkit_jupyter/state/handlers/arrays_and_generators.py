"""Handlers for NumPy arrays, byte buffers and random generators."""

from __future__ import annotations

import ctypes
import operator
import random
from array import array
from collections.abc import Iterable
from mmap import mmap
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.state.handlers.base import CopyBudget, StateHandler


class Arrays(StateHandler):
    """Handle NumPy arrays; arrays of objects are handled like lists."""

    bulky = True

    types = (np.ndarray,)

    def children(self, instance: Any) -> Iterable[Any]:
        return _bare(instance).ravel().tolist() if instance.dtype == object else ()

    def copy(self, instance: Any, copies: CopyBudget) -> tuple[Any, Any]:
        """Return a copy (None if too large) and the header. Raises TypeError for object fields."""
        plain = _bare(instance)
        if plain.dtype.hasobject and plain.dtype != object:
            raise TypeError("it has fields of objects")
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
        parts = [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (plain, saved)]
        return np.array_equal(parts[0], parts[1])

    def put_back(self, instance: Any, memory: tuple[Any, Any]) -> None:
        """Write the values in place. Raises ValueError if dtype, shape or strides have changed."""
        saved, header = memory
        if _header(instance) != header:
            raise ValueError("its shape, strides or dtype was changed in place")
        if saved is not None:
            np.copyto(_bare(instance), saved)


def _bare(array: Any) -> Any:
    """Return a view as a plain `np.ndarray`, because a subclass may override methods."""
    return array.view(np.ndarray)


def _header(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides


class Buffers(StateHandler):
    """Handle objects with the buffer protocol, such as bytearray."""

    types = (bytearray, array, mmap, memoryview, ctypes._SimpleCData.__mro__[1])

    def copy(self, instance: Any, copies: CopyBudget) -> bytes | None:
        with memoryview(instance) as view:
            return view.tobytes() if copies.fits(instance, view.nbytes) else None

    def same(self, instance: Any, memory: bytes | None) -> bool:
        return memory is None or memoryview(instance).tobytes() == memory

    def put_back(self, instance: Any, memory: bytes) -> None:
        """Write the bytes in place. Raises BufferError if a view prevents a change of the size."""
        if isinstance(instance, bytearray | array) and memoryview(instance).nbytes != len(memory):
            del instance[:]
            write = instance.extend if isinstance(instance, bytearray) else instance.frombytes
            write(memory)
        else:
            place = (ctypes.c_char * len(memory)).from_buffer(instance)
            ctypes.memmove(place, memory, len(memory))


class Generators(StateHandler):
    """Handle random generators of Python, NumPy and torch."""

    types = (
        *(random.Random, torch.Generator, np.random.RandomState),
        *(np.random.BitGenerator, np.random.Generator),
    )

    def recognizes(self, cls: type) -> bool:
        return super().recognizes(cls) and not issubclass(cls, random.SystemRandom)

    def copy(self, instance: Any, copies: CopyBudget) -> Any:
        source = getattr(instance, "bit_generator", instance)
        return source.state if (read := _method(source, "get")) is None else read()

    def same(self, instance: Any, memory: Any) -> bool:
        return bool(comparable(self.copy(instance, CopyBudget())) == comparable(memory))

    def put_back(self, instance: Any, memory: Any) -> None:
        source = getattr(instance, "bit_generator", instance)
        if (write := _method(source, "set")) is None:
            source.state = memory
        else:
            write(memory)


def _method(generator: Any, verb: str) -> Any:
    """Return the "get" or "set" method (`verb`) of the state; None if it is an attribute."""
    return getattr(generator, f"{verb}state", getattr(generator, f"{verb}_state", None))


def comparable(state: Any) -> Any:
    """Return a state with arrays and tensors as lists, so that `==` can compare it."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: comparable(part) for key, part in state.items()}
    return tuple(map(comparable, state)) if isinstance(state, tuple | list) else state
