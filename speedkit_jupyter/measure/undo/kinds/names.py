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

    def children(self, found: Names) -> Iterable[Any]:
        """The values."""
        return [found.space[name] for name in found.all if name in found.space]

    def copy(self, found: Names, copies: Copies) -> dict[str, Any]:
        """What each means."""
        return {name: found.space.get(name, MISSING) for name in found.all}

    def same(self, found: Names, memory: dict[str, Any]) -> bool:
        """By identity."""
        return all(found.space.get(name, MISSING) is one for name, one in memory.items())

    def put_back(self, found: Names, memory: dict[str, Any]) -> None:
        """Those that the code binds; others may have been bound by another cell."""
        for name in found.bound:
            if memory[name] is MISSING:
                found.space.pop(name, None)
            elif found.space.get(name, MISSING) is not memory[name]:
                found.space[name] = memory[name]

    def replace(self, found: Names, old: Any, new: Any) -> None:
        """Every name of it."""
        for name in found.all:
            if found.space.get(name, MISSING) is old:
                found.space[name] = new


class Cells(Kind):
    """Variables of an enclosing function (`nonlocal`)."""

    can_replace = True

    def recognizes(self, cls: type) -> bool:
        """What a closure consists of."""
        return cls is CellType

    def children(self, found: CellType) -> Iterable[Any]:
        """The value, if it has one yet."""
        value = _content(found)
        return () if value is MISSING else (value,)

    def copy(self, found: CellType, copies: Copies) -> Any:
        """The value."""
        return _content(found)

    def same(self, found: CellType, memory: Any) -> bool:
        """By identity."""
        return _content(found) is memory

    def put_back(self, found: CellType, memory: Any) -> None:
        """Bind it, or leave it without a value."""
        if memory is MISSING:
            del found.cell_contents
        else:
            found.cell_contents = memory

    def replace(self, found: CellType, old: Any, new: Any) -> None:
        """The variable."""
        found.cell_contents = new


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

    def children(self, found: ModuleType) -> Iterable[Any]:
        """Its names, where it is the user's."""
        if is_the_users_module(found):
            names = [name for name in vars(found) if name[:2] != "__"]
            yield Names(vars(found), names, names)


def namespaces(found: Iterable[Any]) -> list[Any]:
    """The globals of the user's own functions among objects, and of a cell, each once."""
    spaces = [one.space for one in found if type(one) is Names]
    spaces += [
        one.__globals__ for one in found if type(one) is FunctionType and is_the_users_function(one)
    ]
    return list({id(one): one for one in spaces}.values())


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The global names that a function's code reads, and those that it binds or deletes, also in
    a lambda or a comprehension inside it.
    """
    read: dict[str, None] = {}
    bound: dict[str, None] = {}
    codes = [code]
    while codes:
        one = codes.pop()
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[instruction.argval] = None
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                bound[instruction.argval] = None
    return tuple(read), tuple(bound)
