"""What the user's own code spells: attributes that it names or stores, modules, texts."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.calls import ATTRIBUTES, arguments, changing_files
from speedkit_jupyter.measure.undo.kinds.names import Names
from speedkit_jupyter.measure.undo.kinds.origin import is_installed_code, is_the_users_function

STORES = ("STORE_ATTR", "DELETE_ATTR")
# What writes files or leaves something behind that nobody can read: functions by their name, and
# what else the same code has to name.
LEAVES = {
    "write_text": "", "write_bytes": "", "savefig": "", "savez": "", "savez_compressed": "",
    "savetxt": "", "save": "torch np numpy", "system": "os", "Popen": "subprocess",
    "addaudithook": "sys", "CDLL": "ctypes", "PyDLL": "ctypes", "cdll": "ctypes",
    "register_error": "codecs", "register": "codecs", "register_event_handler": "monitor",
    "set_wakeup_fd": "signal", "dump_traceback_later": "faulthandler",
}  # fmt: skip
# How `open` is told to write, and methods that are called without being named.
MODE = re.compile(r"[rbtU]*[wax+][rbtwax+]*")
UNNAMED = re.compile(r"__\w+__|forward|<\w+>")
WORD = re.compile(r"[^\W\d]\w*")


class Words:
    """Of all code of the user's among objects: functions, methods, a cell.

    `named` are all words; `stored` those that code gives a value as an attribute, or that stand
    in a text, be it for `setattr` or `exec`; `modules` are those that it imports or names whole.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        self.named: set[str] = set()
        self.stored: set[str] = set()
        self.modules: set[str] = set()
        codes = [code for one in found for code in _codes(one)]
        seen: set[CodeType] = set()
        while codes:
            code = codes.pop()
            if code not in seen:
                seen.add(code)
                codes += [one for one in code.co_consts if isinstance(one, CodeType)]
                self._read(code)
        self.named |= self.stored

    def leaves(self, found: Iterable[Any], near: Iterable[Any]) -> list[str]:
        """What the code calls that writes files or can't be taken back: `open(…, "w")`.

        Of methods only those count that code which may run calls by that name.
        """
        waiting = _with_inner(code for one in found for code in _codes(one))
        ready = _with_inner(code for one in near for code in _codes(one))
        spaces = _spaces([*found, *near])
        ready = [code for code in ready if not is_installed_code(code)]
        left, names = {code for code in waiting if code not in ready}, set[str]()
        calls: dict[str, None] = {}
        while ready:
            for code in ready:
                names.update(code.co_names)
                calls |= dict.fromkeys(_lasting(code))
                calls |= dict.fromkeys(changing_files(code, spaces.get(code, {})))
            ready = [one for one in left if one.co_name in names or UNNAMED.match(one.co_name)]
            left.difference_update(ready)
            ready = [one for one in ready if not is_installed_code(one)]
        return list(calls)

    def _read(self, code: CodeType) -> None:
        self.named.update(code.co_names)
        for one in dis.get_instructions(code):
            if one.opname in STORES:
                self.stored.add(one.argval)
            elif one.opname == "IMPORT_NAME":
                self.modules.add(one.argval)
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
    waiting, found = list(codes), dict[CodeType, None]()
    while waiting:
        found[code := waiting.pop()] = None
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return list(found)


def _spaces(found: Iterable[Any]) -> dict[CodeType, Any]:
    """The globals of all the code."""
    spaces: dict[CodeType, Any] = {}
    for one in found:
        # Of other objects an attribute may be the user's own code.
        space = one.space if type(one) is Names else None
        space = one.__globals__ if type(one) is FunctionType else space
        spaces |= dict.fromkeys(_with_inner(_codes(one)), space or {})
    return spaces


def _lasting(code: CodeType) -> Iterator[str]:
    names = set(code.co_names)
    for name in LEAVES.keys() & names:
        if not LEAVES[name] or not names.isdisjoint(LEAVES[name].split()):
            yield name
    if "open" in names:
        instructions = list(dis.get_instructions(code))
        for index, one in enumerate(instructions):
            if one.argval == "open":
                made = arguments(instructions[index:])[1][0 if one.opname in ATTRIBUTES else 1 :]
                given = tuple(each.argval for each in made if each.opname == "LOAD_CONST")
                modes = [each for each in _texts(given) if MODE.fullmatch(each)]
                yield from (f"open(…, {each!r})" for each in modes)


def _codes(found: Any) -> Iterator[CodeType]:
    if type(found) is Names:
        yield from found.codes
    elif type(found) is FunctionType and is_the_users_function(found):
        yield found.__code__


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    """Also those in tuples and sets; but for those with spaces that are no code, as in docs."""
    for one in constants:
        if isinstance(one, str):
            if "=" in one or "(" in one or " " not in one.strip():
                yield one
        elif isinstance(one, tuple | frozenset):
            yield from _texts(tuple(one))
