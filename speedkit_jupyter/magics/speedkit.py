"""%speedkit: find the subcommand, parse, run."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import line as words
from speedkit_jupyter.magics.commands import COMMANDS
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import users_part


def run(names: MutableMapping[str, Any], session: Session, line: str) -> None:
    """One `%speedkit` line; whatever is wrong with it is one UsageError."""
    __tracebackhide__ = True
    line = words.without_comment(line)
    typed = words.split(line)
    name = typed[0] if typed else "status"
    if name.startswith("-"):
        name, rest = "status", line
    else:
        rest = line.strip()[len(name) :]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UsageError(f"%speedkit: unknown subcommand {name!r}.{hint} See %speedkit help")
    command = COMMANDS[name]
    try:
        command.run(names, session, command.parse(rest))
    except SpeedKitError as error:
        if users_part(error):  # one of the user's own, of a class of ours
            raise
        raise UsageError(str(error)) from None
    except KeyboardInterrupt as error:  # no line of ours, nor of what the first one imports
        raise KeyboardInterrupt(str(error) or "stopped; everything is as before") from None
