"""Descriptors that code knows by their numbers: those of files can go back, of pipes they can't."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import attribute_dict
from speedkit_jupyter.measure.undo.kinds.code.names import Names

# Of a longer list nobody means each.
MOST = 64
# Three are the process's own; higher numbers count something else.
FIRST, LAST = 3, 65_536


def are_files(objects: Iterable[Any]) -> bool:
    """Whether there are such, and none of them is a pipe, a socket or a device."""
    numbers = {number for instance in objects for number in _numbers(instance)}
    modes = [mode for mode in map(_mode, numbers) if mode]
    return bool(modes) and all(map(stat.S_ISREG, modes))


def _numbers(instance: Any) -> Iterator[int]:
    for value in _values(instance):
        if type(value) is int and FIRST <= value < LAST:
            yield value


def _values(instance: Any) -> Iterable[Any]:
    cls = type(instance)
    if cls is Names:
        return [instance.space.get(name) for name in instance.all]
    if cls is FunctionType:
        return [*(instance.__defaults__ or ()), *(instance.__kwdefaults__ or {}).values()]
    if cls is CellType:
        try:
            return [instance.cell_contents]
        except ValueError:  # no value yet
            return []
    if cls is list or cls is tuple:
        return list(instance[:MOST])
    values = instance if cls is dict else attribute_dict(instance)
    return list(values.values())[:MOST] if values else []


def _mode(number: int) -> int:
    try:
        return os.fstat(number).st_mode
    except OSError:  # none
        return 0
