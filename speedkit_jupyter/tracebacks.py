"""An error that goes on to the user shows our lines, and keeps nothing of ours alive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PACKAGE = __name__.partition(".")[0]


def lets_go(function: Callable[P, R]) -> Callable[P, R]:
    """Where it raises, our own frames lose their variables: models, and copies of their state.

    A notebook keeps the last traceback, and with it the variables of every frame, until the next
    error. The user's own frames keep theirs, for a debugger.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # Its own frame is still at work, so that it lets go by itself.
            del args, kwargs
            _clear(error, set())
            raise

    return call


def _clear(error: BaseException | None, seen: set[int]) -> None:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        _clear_frames(error.__traceback__)
        _clear(error.__cause__, seen)
        error = error.__context__


def _clear_frames(found: TracebackType | None) -> None:
    while found is not None:
        frame = found.tb_frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == PACKAGE:
            with suppress(RuntimeError):  # still at work
                frame.clear()
        found = found.tb_next
