"""What IPython shows of an error that a magic raises: one line, or the user's own frames."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError

from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import users_part

R = TypeVar("R")
STOPPED = "stopped; everything is as before"


def shown(shell: Any, command: str, run: Callable[[], R]) -> R:
    """Call it: errors for users are one line, those of the user's own code look as without us."""
    __tracebackhide__ = True
    try:
        return run()
    except UsageError as error:
        raise UsageError(legible(str(error))) from None
    except SpeedKitError as error:
        if users_part(error):  # one of the user's own, of a class of ours
            _shows_the_users_part(shell, command, error)
            raise
        raise UsageError(legible(f"{command}: {error}")) from None
    except KeyboardInterrupt as error:
        _shows(error, [f"KeyboardInterrupt: {str(error) or STOPPED}"])
        raise
    except BaseException as error:
        if not hasattr(error, "_render_traceback_"):
            _shows_the_users_part(shell, command, error)
        raise


def _shows_the_users_part(shell: Any, command: str, error: BaseException) -> None:
    part = users_part(error)
    put_back = [] if part is None else [f"({command} has put back what the step changed.)"]
    if isinstance(error, SyntaxError):
        # One of the cell itself has no frames, as in a plain cell.
        frames = traceback.extract_tb(part)
        lines = shell.SyntaxTB.structured_traceback(type(error), error, frames)
        _shows(error, [*lines, *put_back])
        _asks_syntax_errors(shell)
    elif part is not None:
        lines = shell.InteractiveTB.structured_traceback(type(error), error, part, tb_offset=0)
        _shows(error, [*lines, *put_back])


def _asks_syntax_errors(shell: Any) -> None:
    """Have the shell ask the next SyntaxError for its lines, as it asks all other errors.

    Of one that comes out of a magic it would show all frames of its own, and of ours.
    """
    if "showsyntaxerror" in vars(shell):  # waiting still, since the user has caught the last one
        return

    def shows(*arguments: Any, **options: Any) -> None:
        del shell.showsyntaxerror
        error = sys.exc_info()[1]
        lines = getattr(error, "_render_traceback_", None)
        if lines is None:
            shell.showsyntaxerror(*arguments, **options)
        else:
            shell._showtraceback(type(error), error, lines())

    shell.showsyntaxerror = shows


def _shows(error: BaseException, lines: list[str]) -> None:
    """IPython asks an error for its lines: made now, since an error that makes them when it is
    asked would hold on to itself, and to the user's model.
    """
    vars(error)["_render_traceback_"] = lambda: lines  # whatever its class says to attributes


def legible(text: str) -> str:
    """Return the text with long words cut and with escapes for what no terminal can show."""
    short = re.sub(r"\S{161,}", lambda match: f"{match[0][:120]}…{match[0][-20:]}", text)
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in short
    )
