"""The user's own lines: which one something is called from, and how a notebook names it."""

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
# Code of ours that calls the user's.
_DOORS: set[CodeType] = set()


def user_code_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that calls the user's own code: what is raised below is the user's error."""
    _DOORS.add(function.__code__)  # type: ignore[attr-defined]
    return function


def is_user_code_boundary(code: CodeType) -> bool:
    return code in _DOORS


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


def user_spot(depth: int = 1) -> Spot | None:
    """Return the innermost line of the user's own code (no library's, not Python's, not ours), None
    where there is none. Lines that called us are not looked at.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = None if is_user_code_boundary(frame.f_code) else frame.f_back
    if frame is None:
        return None
    # Code that the compiler adds (the end of a `with`) has no line.
    return Spot(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)


@cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's own: no library's, wherever that is installed."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {path for name in names if (path := sysconfig.get_path(name))}
    if torch := sys.modules.get("torch"):  # also built from source, or on PYTHONPATH
        libraries.update(torch.__path__)
    # A dataclass's methods are code of a `<string>`.
    is_ours = file.startswith((OURS, "<frozen ", "<string>", *libraries))
    return not (is_ours or {"site-packages", "dist-packages"} & {*Path(file).parts})


def source(file: str, number: int) -> str:
    """Return the line as it is written; empty in an unknown file."""
    return linecache.getline(file, number).strip()


def cells() -> dict[str, str]:
    """Return the notebook's names of the files that its cells are to Python."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"cell {number}" for file, number in numbers.items()}


def place(spot: Spot) -> str:
    """Return where a line stands, as the notebook says it: `cell 3, line 2`."""
    return f"{cells().get(spot.file) or spot.file.rpartition('/')[2]}, line {spot.number}"
