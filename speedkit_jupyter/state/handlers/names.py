"""Handlers for global names, closure cells, functions, generators and iterators."""

from __future__ import annotations

import dis
import gc
import io
import itertools
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FunctionType, GeneratorType
from typing import Any, NamedTuple

from speedkit_jupyter.state.handlers.base import CopyBudget, NamedParts, StateHandler
from speedkit_jupyter.state.ownership import is_installed, is_machinery, is_the_users_function
from speedkit_jupyter.torchglue.modules import USERS_PARTS, loader_iterator

# Code that uses one of these names may look up any global name by string, as `%time` does.
TEXTUAL = frozenset([
    "globals", "exec", "get_ipython", "__globals__", "f_globals", "__main__", "user_ns", "run_cell",
    "run_line_magic", "run_cell_magic",
])  # fmt: skip


class Names:
    """The names in the namespace `space` that some code uses; all but `__` names if `whole`.

    The code reads the names `read`, assigns or deletes `bound`, and also uses the objects `others`.
    """

    def __init__(
        self,
        space: MutableMapping[str, Any],
        read: Iterable[str] = (),
        bound: Iterable[str] = (),
        others: Iterable[Any] = (),
        whole: bool = False,
    ) -> None:
        self.space, self.bound, self.whole = space, frozenset(bound), whole
        self._some, self.others = [*dict.fromkeys([*read, *self.bound])], [*others]

    @property
    def all(self) -> list[str]:
        return [name for name in self.space if name[:2] != "__"] if self.whole else self._some


class NamesHandler(NamedParts):
    """Handle global names: compare all; restore names that the code binds, or all if `whole`."""

    types = (Names,)

    def children(self, instance: Names) -> Iterable[Any]:
        return [*super().children(instance), *instance.others]

    def copy(self, instance: Names, copies: CopyBudget) -> dict[str, Any]:
        return {name: instance.space[name] for name in instance.all if name in instance.space}

    def write(self, instance: Names, name: str, value: Any) -> None:
        if instance.whole or name in instance.bound:
            instance.space[name] = value

    def delete(self, instance: Names, name: str) -> None:
        if instance.whole or name in instance.bound:
            del instance.space[name]

    def replace(self, instance: Names, old: Any, new: Any) -> None:
        for name, value in self.copy(instance, CopyBudget()).items():
            if value is old:
                instance.space[name] = new


class Cells(NamedParts):
    """Handle closure cells, which hold variables of an enclosing function."""

    types = (CellType,)

    def copy(self, instance: CellType, copies: CopyBudget) -> dict[str, Any]:
        try:
            return {"cell_contents": instance.cell_contents}
        except ValueError:  # no value yet
            return {}

    def replace(self, instance: CellType, old: Any, new: Any) -> None:
        instance.cell_contents = new


class Functions(NamedParts):
    """Handle functions: find the objects that they refer to; restore their defaults and code."""

    types = (FunctionType,)

    def children(self, instance: FunctionType) -> Iterable[Any]:
        if is_machinery(instance.__globals__.get("__name__")):
            return
        yield from instance.__closure__ or ()
        yield from instance.__defaults__ or ()
        if instance.__kwdefaults__:
            yield instance.__kwdefaults__
        if is_the_users_function(instance):
            yield names_of([instance.__code__], instance.__globals__)

    def copy(self, instance: FunctionType, copies: CopyBudget) -> dict[str, Any]:
        parts = ("__code__", "__defaults__", "__kwdefaults__")
        return {part: getattr(instance, part) for part in parts}


class CodeNames(NamedTuple):
    """The global names that code reads, the names that it binds, and its imports."""

    read: tuple[str, ...]
    bound: tuple[str, ...]
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    texts: tuple[str, ...] | None  # words in constants, if code looks up names by string; else None


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> CodeNames:
    """Return the global names of code and of nested code; for a cell, also the names it assigns."""
    found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
    imports, constants, is_dynamic = list[Any](), list[Any](), False
    codes = [code]
    while codes:
        block = codes.pop()
        codes += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
        constants += block.co_consts
        textual = TEXTUAL if block.co_flags & CO_OPTIMIZED else TEXTUAL | {"locals", "vars"}
        is_dynamic |= not textual.isdisjoint(block.co_names)
        before: Any = None
        for instruction in dis.get_instructions(block):
            verb, _, space = instruction.opname.partition("_")
            name = instruction.argval
            is_local = space == "NAME" and verb != "LOAD" and block is not code  # a class body
            if space in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS") and verb in found:
                found[verb].update({} if is_local else {name: None})
            if instruction.opname == "IMPORT_NAME":
                imports.append((name, before or ()))
                is_dynamic |= "*" in (before or ())
            if instruction.opname not in ("EXTENDED_ARG", "CACHE"):
                before = name
    is_dynamic |= "eval" in found["LOAD"]
    texts = (*re.findall(r"\w+", repr(constants)),) if is_dynamic else None
    return CodeNames((*found["LOAD"],), (*found["STORE"], *found["DELETE"]), (*imports,), texts)


def names_of(codes: Sequence[CodeType], space: MutableMapping[str, Any]) -> Names:
    """Return the names of a namespace that code uses, and other objects that the code reaches."""
    read, bound, others = list[str](), list[str](), list[Any]()
    for found in map(global_names, codes):
        read, bound = [*read, *found.read], [*bound, *found.bound]
        for name, parts in found.imports:
            if (module := sys.modules.get(name)) is not None:
                is_whole = not parts or "*" in parts
                others.append(module if is_whole else Names(vars(module), parts))
        if found.texts is not None:
            read += [text for text in found.texts if text in space]
            others.append(Names(space, whole=True))
    return Names(space, read, bound, others)


# --- iterators ---

# These iterators store the elements that they have drawn. A walk does not look into them.
COLLECTING: tuple[type, ...] = (itertools.cycle, type(itertools.tee(())[0]))


class Replay:
    """An iterator that repeats its draws after each `rewind`, so that all steps do equal work.

    New elements come from `source`. At its end, loops end, but `next()` starts again, because many
    timed steps may draw more elements than `source` has. Other attributes come from `original`.
    """

    def __init__(self, original: Iterator[Any], source: Iterator[Any]) -> None:
        self.original, self.drawn = original, list[Any]()
        self._source, self._position = source, 0

    def __iter__(self) -> Iterator[Any]:
        with suppress(StopIteration):
            while True:
                yield self._draw()

    def __next__(self) -> Any:
        try:
            return self._draw()
        except StopIteration:
            if not self.drawn:
                raise
            self.rewind()
            return self._draw()

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "original":  # a special method, or `__init__` hasn't run
            raise AttributeError(name)
        return getattr(self.original, name)

    def __len__(self) -> int:
        return len(self.original)  # type: ignore[arg-type]

    def _draw(self) -> Any:
        if self._position == len(self.drawn):
            self.drawn.append(next(self._source))
        self._position += 1
        return self.drawn[self._position - 1]

    def rewind(self) -> None:
        """Start again, so that the next step draws the same elements."""
        self._position = 0


class Iterators(StateHandler):
    """Handle generators, iterators written in C, and iterators of DataLoaders."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        if issubclass(cls, GeneratorType) or issubclass(cls, loader_iterator()):
            return True
        if not issubclass(cls, Iterator) or issubclass(cls, (io.IOBase, *weakref.ProxyTypes)):
            return False  # a weak proxy always has `__next__`
        return cls.__dictoffset__ == 0 and "__slots__" not in vars(cls)

    def children(self, instance: Any) -> Iterable[Any]:
        """Yield the objects that an iterator refers to; for generators, only in the user's code."""
        if isinstance(instance, loader_iterator()):
            yield from (getattr(instance, name, None) for name in USERS_PARTS)
        elif not isinstance(instance, GeneratorType):
            # Only `gc` knows the parts of a C iterator. Inner iterators advance with `instance`.
            behind = [] if isinstance(instance, COLLECTING) else gc.get_referents(instance)
            yield from (part for part in behind if not issubclass(type(part), Iterator))
        elif (frame := instance.gi_frame) is not None and not is_installed(
            str(frame.f_globals.get("__name__"))
        ):
            yield from frame.f_locals.values()
            yield names_of([instance.gi_code], frame.f_globals)
