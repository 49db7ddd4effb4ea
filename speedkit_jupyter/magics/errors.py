"""What IPython shows of an error that a magic raises: one line, or the user's own frames."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError

from speedkit_jupyter.support.tracebacks import users_part

R = TypeVar("R")
STOPPED = "stopped; everything is as before"


def shown(shell: Any, command: str, run: Callable[..., R], *arguments: Any) -> R:
    """Call it: errors for users are one line, those of the user's own code look as without us."""
    __tracebackhide__ = True
    try:
        return run(*arguments)
    except UsageError as error:
        raise UsageError(legible(str(error))) from None
    except KeyboardInterrupt as error:
        _shows(error, [f"KeyboardInterrupt: {str(error) or STOPPED}"])
        raise
    except SyntaxError as error:  # IPython shows every frame of these
        raise error.with_traceback(users_part(error)) from None
    except BaseException as error:
        if users_part(error) is not None and not hasattr(error, "_render_traceback_"):
            put_back = f"({command} has put back what the step changed.)"
            _shows(error, [*_lines(shell, error), put_back])
        raise


def _lines(shell: Any, error: BaseException) -> list[str]:
    tracebacks = shell.InteractiveTB
    part = users_part(error)
    return list(tracebacks.structured_traceback(type(error), error, part, tb_offset=0))


def _shows(error: BaseException, lines: list[str]) -> None:
    """IPython asks an error for its lines: made now, since an error that makes them when it is
    asked would hold on to itself, and to the user's model.
    """
    vars(error)["_render_traceback_"] = lambda: lines  # whatever its class says to attributes


def legible(text: str) -> str:
    """The text with long words cut and with escapes for what no terminal can show."""
    short = re.sub(r"\S{161,}", lambda match: f"{match[0][:120]}…{match[0][-20:]}", text)
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in short
    )
