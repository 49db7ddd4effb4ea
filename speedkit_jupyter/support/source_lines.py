"""Find locations in the user's code: the line of a call, and the number of its cell."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OURS = str(Path(__file__).parents[1])
_NAMED_BY_IPYTHON_7 = re.compile(r"<ipython-input-(\d+)-")
# Code objects of functions that call the user's code.
_DOORS: set[CodeType] = set()


def user_code_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that calls the user's code: errors from its callees count as the user's."""
    _DOORS.add(function.__code__)  # type: ignore[attr-defined]
    return function


def is_user_code_boundary(code: CodeType) -> bool:
    return code in _DOORS


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


def user_spot(depth: int = 1) -> Spot | None:
    """Return the innermost line of user code; None if there is none, or a boundary comes first."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = None if is_user_code_boundary(frame.f_code) else frame.f_back
    if frame is None:
        return None
    # Instructions that Python's compiler adds (the end of a `with`) have no line.
    return Spot(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)


@cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither a library's nor SpeedKit's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {path for name in names if (path := sysconfig.get_path(name))}
    if torch := sys.modules.get("torch"):  # torch may be built from source, or on PYTHONPATH
        libraries.update(torch.__path__)
    # The generated methods of a dataclass have the file name `<string>`.
    is_ours = file.startswith((OURS, "<frozen ", "<string>", *libraries))
    return not (is_ours or {"site-packages", "dist-packages"} & {*Path(file).parts})


def source(file: str, number: int) -> str:
    """Return the stripped text of a line; empty if the file is unknown."""
    return linecache.getline(file, number).strip()


def place(spot: Spot) -> str:
    """Return a line's location: `cell 3, line 2`, or `train.py, line 2` for a file."""
    number = _cell_number(spot.file)
    name = Path(spot.file).name if number is None else f"cell {number}"
    return f"{name}, line {spot.number}"


def _cell_number(file: str) -> int | None:
    """Return the number of the notebook's cell whose code has this file name; else None."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    compiler = getattr(shell, "compile", None)
    numbers: dict[str, int] | None = getattr(compiler, "_filename_map", None)
    if compiler is None or numbers is not None:
        return (numbers or {}).get(file)
    # IPython 7 has no map, but its file names have the number. For ipykernel, the code is compared.
    if named := _NAMED_BY_IPYTHON_7.match(file):
        return int(named[1])
    code = "".join(linecache.getlines(file)).rstrip("\n")
    inputs: list[str] = shell.history_manager.input_hist_parsed
    return next((at for at in reversed(range(1, len(inputs))) if inputs[at] == code), None)
