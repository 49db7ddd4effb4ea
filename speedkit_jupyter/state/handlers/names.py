"""Names: the globals that code reads and rebinds, the cells of closures, defaults of functions."""

from __future__ import annotations

import dis
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from speedkit_jupyter.state.handlers.base import MISSING, CompositeHandler, CopyBudget, StateHandler
from speedkit_jupyter.state.ownership import is_machinery, is_the_users_function


class Names:
    """Some names of a namespace: those that code reads, and those that it binds anew."""

    def __init__(
        self, space: MutableMapping[str, Any], read: Iterable[str], bound: Iterable[str] = ()
    ) -> None:
        self.space, self.bound = space, frozenset(bound)
        self.all = [*dict.fromkeys([*read, *self.bound])]


class NamesHandler(CompositeHandler):
    """Bindings are compared for all names, and put back for those that the code binds.

    Another cell may have bound the others.
    """

    types = (Names,)

    def copy(self, instance: Names, copies: CopyBudget) -> dict[str, Any]:
        return {name: instance.space.get(name, MISSING) for name in instance.all}

    def put_back(self, instance: Names, memory: dict[str, Any]) -> None:
        for name in instance.bound:
            if memory[name] is MISSING:
                instance.space.pop(name, None)
            elif instance.space.get(name, MISSING) is not memory[name]:
                instance.space[name] = memory[name]

    def replace(self, instance: Names, old: Any, new: Any) -> None:
        for name in instance.all:
            if instance.space.get(name, MISSING) is old:
                instance.space[name] = new


class Cells(CompositeHandler):
    """Variables of an enclosing function (`nonlocal`)."""

    types = (CellType,)

    def copy(self, instance: CellType, copies: CopyBudget) -> tuple[Any, ...]:
        try:
            return (instance.cell_contents,)
        except ValueError:  # no value yet
            return ()

    def put_back(self, instance: CellType, memory: tuple[Any, ...]) -> None:
        if memory:
            instance.cell_contents = memory[0]
        else:
            del instance.cell_contents

    def replace(self, instance: CellType, old: Any, new: Any) -> None:
        instance.cell_contents = new


class Functions(StateHandler):
    """Functions lead to their closures, default arguments and globals."""

    types = (FunctionType,)
    has_state = False

    def children(self, instance: FunctionType) -> Iterable[Any]:
        if is_machinery(instance.__globals__.get("__name__")):
            return
        yield from instance.__closure__ or ()
        yield from instance.__defaults__ or ()
        if instance.__kwdefaults__:
            yield instance.__kwdefaults__
        if is_the_users_function(instance):
            read, bound = global_names(instance.__code__)
            yield Names(instance.__globals__, read, bound)


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the global names that code, or code inside it, reads, and those that it binds."""
    found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
    codes = [code]
    while codes:
        block = codes.pop()
        codes += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(block):
            verb, _, space = instruction.opname.partition("_")
            if space == "GLOBAL" or instruction.opname == "LOAD_NAME":
                found[verb][instruction.argval] = None
    return tuple(found["LOAD"]), (*found["STORE"], *found["DELETE"])
