"""What the user's own code spells: attributes that it names or stores, modules, texts."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.code.calls import (
    ATTRIBUTES,
    arguments,
    changing_files,
    lasting,
)
from speedkit_jupyter.measure.undo.kinds.code.names import Names
from speedkit_jupyter.measure.undo.kinds.code.numbers_of_files import are_files
from speedkit_jupyter.measure.undo.kinds.origin import is_installed_code, is_the_users_function

STORES = ("STORE_ATTR", "DELETE_ATTR")
# What writes files or leaves something behind that nobody can read: functions by their name, and
# what else the same code has to name.
LEAVES = {
    "write_text": "", "write_bytes": "", "savefig": "", "savez": "", "savez_compressed": "",
    "savetxt": "", "save": "torch np numpy", "system": "os", "Popen": "subprocess",
    "urlopen": "", "urlretrieve": "", "addaudithook": "sys", "CDLL": "ctypes", "PyDLL": "ctypes",
    "cdll": "ctypes", "register_event_handler": "monitor", "set_wakeup_fd": "signal",
    "dump_traceback_later": "faulthandler",
}  # fmt: skip
# How `open` is told to write, and methods that are called without being named.
MODE = re.compile(r"[rbtU]*[wax+][rbtwax+]*")
UNNAMED = re.compile(r"__\w+__|forward|<\w+>")
WORD = re.compile(r"[^\W\d]\w*")


class Words:
    """Of all code of the user's among objects: functions, methods, a cell.

    `named` are all words; `stored` those that code gives a value as an attribute, or that stand
    in a text, be it for `setattr` or `exec`; `modules` are those that it imports or names whole.
    `codes` are all of it, each once.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.named: set[str] = set()
        self.stored: set[str] = set()
        self.modules: set[str] = set()
        self.codes: set[CodeType] = set()
        codes = [code for instance in objects for code in _codes(instance)]
        while codes:
            code = codes.pop()
            if code not in self.codes:
                self.codes.add(code)
                codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
                self._read(code)
        self.named |= self.stored

    def leaves(self, objects: Iterable[Any], near: Iterable[Any]) -> list[str]:
        """What the code calls that writes files or can't be taken back: `open(…, "w")`.

        Of methods only those count that code which may run calls by that name.
        """
        waiting = _with_inner(code for instance in objects for code in _codes(instance))
        ready = _with_inner(code for instance in near for code in _codes(instance))
        spaces = _spaces([*objects, *near])
        ready = [code for code in ready if not is_installed_code(code)]
        left, names = {code for code in waiting if code not in ready}, set[str]()
        calls: dict[str, None] = {}
        while ready:
            for code in ready:
                names.update(code.co_names)
                calls |= dict.fromkeys(_lasting(code))
                calls |= dict.fromkeys(changing_files(code, spaces.get(code, {})))
            ready = [code for code in left if code.co_name in names or UNNAMED.match(code.co_name)]
            left.difference_update(ready)
            ready = [code for code in ready if not is_installed_code(code)]
        return lasting(calls, lambda: are_files(objects))

    def _read(self, code: CodeType) -> None:
        self.named.update(code.co_names)
        for instruction in dis.get_instructions(code):
            if instruction.opname in STORES:
                self.stored.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                self.modules.add(instruction.argval)
        for text in _texts(code.co_consts):
            self.stored.update(WORD.findall(text))
            parts = text.split(".")
            self.modules.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))

    def namespaces(self) -> Iterator[ModuleType]:
        """The modules that it imports or names, where they are loaded."""
        for name in self.modules:
            parts = name.split(".")
            for n in range(1, len(parts) + 1):
                module = sys.modules.get(".".join(parts[:n]))
                if isinstance(module, ModuleType):
                    yield module


def _with_inner(codes: Iterable[CodeType]) -> list[CodeType]:
    waiting, result = list(codes), dict[CodeType, None]()
    while waiting:
        result[code := waiting.pop()] = None
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return list(result)


def _spaces(objects: Iterable[Any]) -> dict[CodeType, Any]:
    """The globals of all the code."""
    spaces: dict[CodeType, Any] = {}
    for instance in objects:
        # Of other objects an attribute may be the user's own code.
        space = instance.space if type(instance) is Names else None
        space = instance.__globals__ if type(instance) is FunctionType else space
        spaces |= dict.fromkeys(_with_inner(_codes(instance)), space or {})
    return spaces


def _lasting(code: CodeType) -> Iterator[str]:
    names = set(code.co_names)
    for name in LEAVES.keys() & names:
        if not LEAVES[name] or not names.isdisjoint(LEAVES[name].split()):
            yield name
    if "open" in names:
        instructions = list(dis.get_instructions(code))
        for index, load in enumerate(instructions):
            if load.argval == "open":
                made = arguments(instructions[index:])[1][0 if load.opname in ATTRIBUTES else 1 :]
                given = tuple(
                    constant.argval for constant in made if constant.opname == "LOAD_CONST"
                )
                modes = [mode for mode in _texts(given) if MODE.fullmatch(mode)]
                yield from (f"open(…, {mode!r})" for mode in modes)


def _codes(instance: Any) -> Iterator[CodeType]:
    if type(instance) is Names:
        yield from instance.codes
    elif type(instance) is FunctionType and is_the_users_function(instance):
        yield instance.__code__


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    """Also those in tuples and sets; but for those with spaces that are no code, as in docs."""
    for constant in constants:
        if isinstance(constant, str):
            if "=" in constant or "(" in constant or " " not in constant.strip():
                yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _texts(tuple(constant))
