"""Names: the globals that code reads and rebinds, the cells of closures, defaults of functions."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import resolve_name
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from speedkit_jupyter.state.handlers.base import MISSING, CompositeHandler, CopyBudget, StateHandler
from speedkit_jupyter.state.ownership import is_machinery, is_the_users_function

# Code with one of these names may get at any name of its namespace by text, as `%time` does.
TEXTUAL = frozenset(
    [
        "globals", "exec", "get_ipython", "__globals__", "f_globals", "user_ns", "run_cell",
        "run_line_magic", "run_cell_magic", "__main__",
    ]
)  # fmt: skip
# Outside of functions these do, too.
OWN_NAMES = frozenset(["locals", "vars"])
# Names that get at a module by a text: `importlib.import_module("state")`, `sys.modules["state"]`.
IMPORTING = frozenset(["import_module", "__import__", "modules"])


class Names:
    """Some names of a namespace: names that code reads, and names that it binds anew.

    Or the `whole` namespace, but for names of Python's own. `others` are further objects that the
    code reaches: its imports, and the whole namespace where it asks for names that are text.
    """

    def __init__(
        self,
        space: MutableMapping[str, Any],
        read: Iterable[str] = (),
        bound: Iterable[str] = (),
        whole: bool = False,
        others: Iterable[Any] = (),
    ) -> None:
        self.space, self.bound, self.whole = space, frozenset(bound), whole
        self._some, self.others = [*dict.fromkeys([*read, *self.bound])], [*others]

    @property
    def all(self) -> list[str]:
        return [name for name in self.space if name[:2] != "__"] if self.whole else self._some


class NamesHandler(CompositeHandler):
    """Bindings are compared for all names, and put back for those that the code binds.

    Another cell may have bound the others.
    """

    types = (Names,)

    def children(self, instance: Names) -> Iterable[Any]:
        return [*super().children(instance), *instance.others]

    def copy(self, instance: Names, copies: CopyBudget) -> dict[str, Any]:
        return {name: instance.space.get(name, MISSING) for name in instance.all}

    def put_back(self, instance: Names, memory: dict[str, Any]) -> None:
        for name in {*memory, *instance.all} if instance.whole else instance.bound:
            before = memory.get(name, MISSING)
            if before is MISSING:
                instance.space.pop(name, None)
            elif instance.space.get(name, MISSING) is not before:
                instance.space[name] = before

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
    """Functions lead to their closures, default arguments and globals; defaults and code return."""

    types = (FunctionType,)
    PARTS = ("__code__", "__defaults__", "__kwdefaults__")

    def children(self, instance: FunctionType) -> Iterable[Any]:
        if is_machinery(instance.__globals__.get("__name__")):
            return
        yield from instance.__closure__ or ()
        yield from instance.__defaults__ or ()
        if instance.__kwdefaults__:
            yield instance.__kwdefaults__
        if is_the_users_function(instance):
            yield names_of([instance.__code__], instance.__globals__)

    def copy(self, instance: FunctionType, copies: CopyBudget) -> list[Any]:
        return [getattr(instance, part) for part in self.PARTS]

    def put_back(self, instance: FunctionType, memory: list[Any]) -> None:
        for part, value in zip(self.PARTS, memory, strict=True):
            if getattr(instance, part) is not value:
                setattr(instance, part, value)


class CodeNames(NamedTuple):
    """The global names that code reads and binds, and its imports: level, module, names.

    `texts` are words of its constants where it asks for names that are text, else None.
    """

    read: tuple[str, ...]
    bound: tuple[str, ...]
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    texts: frozenset[str] | None


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> CodeNames:
    """Return what code, or code inside it, names; of a cell, the names that it assigns too."""
    found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
    imports, constants, is_dynamic = list[Any](), list[Any](), False
    codes = [code]
    while codes:
        block = codes.pop()
        codes += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
        constants += block.co_consts
        is_function = block.co_flags & CO_OPTIMIZED
        is_dynamic |= not TEXTUAL.isdisjoint(block.co_names)
        is_dynamic |= not is_function and not OWN_NAMES.isdisjoint(block.co_names)
        if not IMPORTING.isdisjoint(block.co_names):
            imports += [(0, text, ()) for text in block.co_consts if isinstance(text, str)]
        before: list[Any] = [None, None]
        for instruction in dis.get_instructions(block):
            verb, _, space = instruction.opname.partition("_")
            name = instruction.argval
            is_local = space == "NAME" and verb != "LOAD" and block is not code  # of a class
            if space in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS") and verb in found:
                found[verb].update({} if is_local else {name: None})
            if instruction.opname == "IMPORT_NAME":
                imports.append((before[0], name, before[1] or ()))
                is_dynamic |= "*" in (before[1] or ())
            if instruction.opname not in ("EXTENDED_ARG", "CACHE"):
                before = [before[1], name]
    is_dynamic |= "eval" in found["LOAD"]
    texts = frozenset(re.findall(r"\w+", repr(constants))) if is_dynamic else None
    return CodeNames((*found["LOAD"],), (*found["STORE"], *found["DELETE"]), (*imports,), texts)


def names_of(codes: Sequence[CodeType], space: MutableMapping[str, Any]) -> Names:
    """Return the names of a namespace that code uses, with the other objects that it reaches."""
    read, bound, others = list[str](), list[str](), list[Any]()
    for found in map(global_names, codes):
        read, bound = [*read, *found.read], [*bound, *found.bound]
        for level, name, parts in found.imports:
            with suppress(ImportError, KeyError):  # it does not exist, or is loaded by the step
                full = resolve_name("." * level + name, str(space.get("__package__") or "_"))
                module = sys.modules[full]
                is_whole = not parts or "*" in parts
                others.append(module if is_whole else Names(vars(module), parts))
        if found.texts is not None:
            read += found.texts & space.keys()
            others.append(Names(space, whole=True))
    return Names(space, read, bound, others=others)
