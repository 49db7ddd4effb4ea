"""The user's own lines: the line of a call, and its name in a notebook."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OURS = str(Path(__file__).parents[1])
# Code of functions that call the user's code.
_DOORS: set[CodeType] = set()


def user_code_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that calls the user's code: errors below it are the user's."""
    _DOORS.add(function.__code__)  # type: ignore[attr-defined]
    return function


def is_user_code_boundary(code: CodeType) -> bool:
    return code in _DOORS


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


def user_spot(depth: int = 1) -> Spot | None:
    """Return the innermost line of the user's code; None outside of code that SpeedKit calls."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = None if is_user_code_boundary(frame.f_code) else frame.f_back
    if frame is None:
        return None
    # Code that the compiler adds (the end of a `with`) has no line.
    return Spot(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)


@cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's own, and no library's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {path for name in names if (path := sysconfig.get_path(name))}
    if torch := sys.modules.get("torch"):  # also built from source, or on PYTHONPATH
        libraries.update(torch.__path__)
    # A dataclass's methods are code of a `<string>`.
    is_ours = file.startswith((OURS, "<frozen ", "<string>", *libraries))
    return not (is_ours or {"site-packages", "dist-packages"} & {*Path(file).parts})


def source(file: str, number: int) -> str:
    """Return a line of a file; empty in an unknown file."""
    return linecache.getline(file, number).strip()


def cells() -> dict[str, str]:
    """Return the notebook's cells by Python's names of their files."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"cell {number}" for file, number in numbers.items()}


def place(spot: Spot) -> str:
    """Return the place of a line in the notebook's words: `cell 3, line 2`."""
    return f"{cells().get(spot.file) or spot.file.rpartition('/')[2]}, line {spot.number}"
