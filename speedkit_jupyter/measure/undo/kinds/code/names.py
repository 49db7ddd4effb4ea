"""Names: the globals that code reads and rebinds, a module's own, the cells of closures."""

from __future__ import annotations

import dis
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.base import MISSING, Copies, Kind
from speedkit_jupyter.measure.undo.kinds.origin import is_the_users_function, is_the_users_module


class Names:
    """Some names of a namespace: those that code reads, and those that it binds anew.

    `codes` is the code itself where no function has it: a cell's.
    """

    def __init__(
        self,
        space: MutableMapping[str, Any],
        read: Iterable[str],
        bound: Iterable[str] = (),
        codes: Iterable[CodeType] = (),
    ) -> None:
        self.space, self.bound, self.codes = space, frozenset(bound), tuple(codes)
        self.all = [*dict.fromkeys([*read, *self.bound])]


class NamesKind(Kind):
    """Bindings are compared for all names, and put back for those that the code binds."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """Only our own."""
        return cls is Names

    def children(self, instance: Names) -> Iterable[Any]:
        """The values."""
        return [instance.space[name] for name in instance.all if name in instance.space]

    def copy(self, instance: Names, copies: Copies) -> dict[str, Any]:
        """What each means."""
        return {name: instance.space.get(name, MISSING) for name in instance.all}

    def same(self, instance: Names, memory: dict[str, Any]) -> bool:
        """By identity."""
        return all(instance.space.get(name, MISSING) is value for name, value in memory.items())

    def put_back(self, instance: Names, memory: dict[str, Any]) -> None:
        """Those that the code binds; others may have been bound by another cell."""
        for name in instance.bound:
            if memory[name] is MISSING:
                instance.space.pop(name, None)
            elif instance.space.get(name, MISSING) is not memory[name]:
                instance.space[name] = memory[name]

    def replace(self, instance: Names, old: Any, new: Any) -> None:
        """Every name of it."""
        for name in instance.all:
            if instance.space.get(name, MISSING) is old:
                instance.space[name] = new


class Cells(Kind):
    """Variables of an enclosing function (`nonlocal`)."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """What a closure consists of."""
        return cls is CellType

    def children(self, instance: CellType) -> Iterable[Any]:
        """The value, if it has one yet."""
        value = _content(instance)
        return () if value is MISSING else (value,)

    def copy(self, instance: CellType, copies: Copies) -> Any:
        """The value."""
        return _content(instance)

    def same(self, instance: CellType, memory: Any) -> bool:
        """By identity."""
        return _content(instance) is memory

    def put_back(self, instance: CellType, memory: Any) -> None:
        """Bind it, or leave it without a value."""
        if memory is MISSING:
            del instance.cell_contents
        else:
            instance.cell_contents = memory

    def replace(self, instance: CellType, old: Any, new: Any) -> None:
        """The variable."""
        instance.cell_contents = new


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # no value yet
        return MISSING


class Modules(Kind):
    """A module that the user wrote: all of its names."""

    has_state = False
    anywhere = True

    def recognizes(self, cls: type) -> bool:
        """Modules of every kind."""
        return issubclass(cls, ModuleType)

    def children(self, instance: ModuleType) -> Iterable[Any]:
        """Its names, where it is the user's."""
        if is_the_users_module(instance):
            names = [name for name in vars(instance) if name[:2] != "__"]
            yield Names(vars(instance), names, names)


def namespaces(objects: Iterable[Any]) -> list[Any]:
    """The globals of the user's own functions among objects, and of a cell, each once."""
    spaces = [names.space for names in objects if type(names) is Names]
    spaces += [
        function.__globals__
        for function in objects
        if type(function) is FunctionType and is_the_users_function(function)
    ]
    return list({id(space): space for space in spaces}.values())


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The global names that a function's code reads, and those that it binds or deletes, also in
    a lambda or a comprehension inside it.
    """
    read: dict[str, None] = {}
    bound: dict[str, None] = {}
    codes = [code]
    while codes:
        block = codes.pop()
        codes += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(block):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[instruction.argval] = None
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                bound[instruction.argval] = None
    return tuple(read), tuple(bound)
