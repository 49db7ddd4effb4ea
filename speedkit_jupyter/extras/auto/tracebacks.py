"""Show only the user's lines if Ctrl-C arrives in a hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from speedkit_jupyter.support.tracebacks import P, R


def hide_when_interrupted(hook: Callable[P, R]) -> Callable[P, R]:
    """Wrap a hook to hide its frames if Ctrl-C stops it; else IPython would show the last frame."""

    @wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return hook(*args, **kwargs)
        except KeyboardInterrupt as stop:
            vars(stop)["_render_traceback_"] = _users_lines
            raise stop.with_traceback(None)  # noqa: B904

    return call


def _users_lines() -> list[str]:
    """Return IPython's traceback of the current error as lines, up to the last visible frame."""
    from IPython import get_ipython

    error: Any = sys.exc_info()[1]
    last = entry = error.__traceback__
    while entry is not None:
        last = last if "__tracebackhide__" in entry.tb_frame.f_locals else entry
        entry = entry.tb_next
    last.tb_next = None
    shown: Any = type(error), error, error.__traceback__
    return list(get_ipython().InteractiveTB.structured_traceback(*shown, tb_offset=1))
