"""Whether two functions compute the same: instruction by instruction, whatever their variables are
called.

So a class is known by what its forward does, and not by its name: a library's copies of a layer
are found, and a layer that a newer version computes otherwise is not.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

# What these names have to mean, wherever they are read.
MODULES = {"torch": "torch", "F": "torch.nn.functional", "nn": "torch.nn"}
# Instructions that compute nothing.
SILENT = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "MAKE_CELL", "NOT_TAKEN"}


def alike(function: Any, reference: Any) -> bool:
    """Whether the function computes what the reference does; what both call has to be alike too."""
    if not isinstance(function, FunctionType) or function.__closure__ or function.__kwdefaults__:
        return False
    found, known = function.__code__, reference.__code__
    # The first is quick, and most functions differ in it.
    if {*found.co_names} != {*known.co_names} or _outline(found) != _outline(known):
        return False
    return all(
        _means_the_same(name, function.__globals__, reference.__globals__)
        for name in _globals(found)
    )


def _means_the_same(name: str, found: dict[str, Any], known: dict[str, Any]) -> bool:
    if name in MODULES:
        return found.get(name) is sys.modules.get(MODULES[name])
    if isinstance(known.get(name), FunctionType):
        return alike(found.get(name), known[name])
    return name not in found and name not in known  # one of Python's own


@lru_cache(maxsize=512)
def _outline(code: CodeType) -> tuple[Any, ...]:
    """Its instructions, with numbers for variables: first the arguments that it reads, in order."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in SILENT]
    read = {name for step in steps for name in _variables(step)}
    arguments = code.co_varnames[: code.co_argcount]
    numbers = {name: n for n, name in enumerate(filter(read.__contains__, arguments))}
    return tuple((step.opname, _meant(step, numbers)) for step in steps)


def _variables(step: dis.Instruction) -> tuple[str, ...]:
    if "FAST" not in step.opname:
        return ()
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _meant(step: dis.Instruction, numbers: dict[str, int]) -> Any:
    names = _variables(step)
    if not names:
        return type(step.argval), step.argval
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _globals(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
