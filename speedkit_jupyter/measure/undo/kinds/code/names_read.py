"""Which names, attributes and keys code reads before it gives them a value, and for what.

Most steps leave their loss and outputs in names that the next call binds anew: what lay there
before is nobody's concern. So is what is only asked for its shape, detached, or added to.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

NOISE = frozenset(
    ["CACHE", "PRECALL", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG", "NOT_TAKEN", "KW_NAMES"]
)
# Of a name, ordered as they may begin: `LOAD_DEREF`, `LOAD_FROM_DICT_OR_DEREF`.
OF_NAMES = ("GLOBAL", "NAME", "DEREF")
# What is asked of a tensor or a list, and leads to no graph.
HARMLESS = frozenset(
    [
        "detach", "item", "data", "shape", "size", "dim", "ndim", "dtype", "device", "numel",
        "tolist", "requires_grad", "is_leaf", "append", "extend", "appendleft", "clear", "nelement",
        "element_size", "layout", "is_cuda", "grad", "add", "update", "isnan", "isfinite",
    ]
)  # fmt: skip
SHOWING = frozenset(
    ["print", "float", "int", "len", "repr", "str", "isinstance", "type", "id", "format", "bool"]
)


class Key(NamedTuple):
    """A `name`, an `attribute` or an `item` of a dict that is called so."""

    kind: str
    name: Any


class Uses:
    """Of some code: what it `reads` for more than a look, and what it `binds` before."""

    def __init__(self, codes: Iterable[CodeType]) -> None:
        self.reads: set[Key] = set()
        self.binds: set[Key] = set()
        self._detaching = {code.co_name for code in codes if "detach" in _words(code)}
        for code in codes:
            self._read(code)

    def leads_on(self, key: Key) -> bool:
        """Whether what lay there before the code ran is used by it."""
        return key in self.reads and key not in self.binds

    def _read(self, code: CodeType) -> None:
        seen: set[Key] = set()
        parts = [part for part in dis.get_instructions(code) if part.opname not in NOISE]
        for index in range(len(parts)):
            place = _binding(parts, index)
            if place is not None:
                if place not in seen:
                    self.binds.add(place)
                seen.add(place)
            place = _reading(parts, index)
            if place is not None and place not in seen and not self._is_harmless(parts, index):
                self.reads.add(place)
                seen.add(place)

    def _is_harmless(self, parts: Sequence[dis.Instruction], index: int) -> bool:
        following = [*parts[index + 1 : index + 3], *[None] * 2]
        before = parts[index - 1] if index else None
        first, second = following[:2]
        if first is None:
            return False
        if _is_attribute(first) and first.argval in HARMLESS:
            return True
        if second is not None and second.opname == "STORE_SUBSCR":
            return True
        is_tested = second is not None and second.opname in ("IS_OP", "CONTAINS_OP")
        if is_tested or first.opname.startswith(("POP_JUMP", "FORMAT_", "POP_TOP", "TO_BOOL")):
            return True
        if first.opname == "GET_ITER" and isinstance(inner := _made(parts, index), CodeType):
            return "detach" in _words(inner)
        called = before.argval if before is not None and _of_a_name(before, "LOAD_") else None
        return called in SHOWING or called in self._detaching


def _binding(parts: Sequence[dis.Instruction], index: int) -> Key | None:
    part = parts[index]
    if _of_a_name(part, "STORE_") or _of_a_name(part, "DELETE_"):
        return Key("name", part.argval)
    if part.opname in ("STORE_ATTR", "DELETE_ATTR"):
        return Key("attribute", part.argval)
    if part.opname == "STORE_SUBSCR" and index and parts[index - 1].opname == "LOAD_CONST":
        return Key("item", parts[index - 1].argval)
    return None


def _reading(parts: Sequence[dis.Instruction], index: int) -> Key | None:
    part = parts[index]
    if _of_a_name(part, "LOAD_"):
        return Key("name", part.argval)
    if _is_attribute(part):
        return Key("attribute", part.argval)
    if _is_item(part) and index and parts[index - 1].opname == "LOAD_CONST":
        key = parts[index - 1].argval
        return Key("item", key) if isinstance(key, str | int) else None
    return None


def _of_a_name(part: dis.Instruction, begins: str) -> bool:
    return part.opname.startswith(begins) and part.opname.endswith(OF_NAMES)


def _is_attribute(part: dis.Instruction) -> bool:
    return part.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _is_item(part: dis.Instruction) -> bool:
    return part.opname == "BINARY_SUBSCR" or (part.opname == "BINARY_OP" and part.argrepr == "[]")


def _made(parts: Sequence[dis.Instruction], index: int) -> Any:
    """The code of the comprehension that goes over what is loaded here."""
    for part in reversed(parts[max(index - 3, 0) : index]):
        if part.opname == "LOAD_CONST":
            return part.argval
    return None


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)
