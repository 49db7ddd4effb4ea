"""The subcommands of `%speedkit`, in the order of help, and the line that names one."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import line as words
from speedkit_jupyter.magics.commands import apply, code, engines, free, help, kept, plans
from speedkit_jupyter.magics.line import Command
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import users_part

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        plans.STATUS,
        plans.REPORT,
        apply.COMMAND,
        plans.RESTORE,
        engines.ADVISE,
        engines.LOADER,
        engines.BATCH,
        engines.VERIFY,
        kept.TUNED,
        plans.CATALOG,
        plans.EXPLAIN,
        code.COMMAND,
        plans.PANEL,
        kept.HISTORY,
        kept.CONFIG,
        free.COMMAND,
        help.REPAIR,
        help.VERBOSITY,
    )
}
COMMANDS["help"] = help.help_command(COMMANDS)


def run(names: MutableMapping[str, Any], session: Session, line: str) -> None:
    """Run one `%speedkit` line; whatever is wrong with it is one UsageError."""
    __tracebackhide__ = True
    line = words.without_comment(line)
    typed = words.split(line)
    name = typed[0] if typed and not typed[0].startswith("-") else "status"
    rest = line.strip()[len(name) :] if typed and typed[0] == name else line
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
