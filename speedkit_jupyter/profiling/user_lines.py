"""Which line of the user's own code something is called from."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1])


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame of the user's own code: no library's, not Python's, not ours.

    None where there is none: what a thread of a library's calls.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@cache
def is_torchs(file: str) -> bool:
    """Whether it is one of torch's own."""
    return file.startswith(_torch())


def source(file: str, number: int) -> str:
    """The line as it is written; empty where nothing is known of the file."""
    return linecache.getline(file, number).strip()


@cache
def is_users(file: str) -> bool:
    """Whether it is the user's own: no library's, not Python's, not ours."""
    if file.startswith((OURS, "<frozen ")):
        return False
    return not file.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """Where Python keeps its own modules and what is installed."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({path for name in names if (path := sysconfig.get_path(name))})


@cache
def _torch() -> str:
    import torch

    return str(Path(torch.__file__).parent)
