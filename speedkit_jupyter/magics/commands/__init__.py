"""The subcommands of `%speedkit`, in the order of help, and the line that names one."""

from __future__ import annotations

from IPython.core.error import UsageError

from speedkit_jupyter.magics import line as words
from speedkit_jupyter.magics.commands import apply, help, kept, plans, steps
from speedkit_jupyter.magics.commands.free import free
from speedkit_jupyter.magics.line import Command, Names
from speedkit_jupyter.magics.namespace import check_result_name
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames, users_part

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        plans.status,
        plans.report,
        apply.apply,
        plans.restore,
        steps.advise,
        steps.loader,
        steps.batch,
        steps.verify,
        kept.tuned,
        plans.catalog,
        plans.explain,
        plans.code,
        plans.panel,
        kept.history,
        kept.config,
        free,
        help.verbosity,
    )
}
COMMANDS["help"] = help.help_command(COMMANDS)


def run(names: Names, session: Session, line: str) -> None:
    """Run one `%speedkit` line; whatever is wrong with it is one UsageError."""
    __tracebackhide__ = True
    line = words.without_comment(line)
    typed = words.split(line)
    name = typed[0] if typed and not typed[0].startswith("-") else "status"
    rest = line.strip()[len(name) :] if typed and typed[0] == name else line
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UsageError(f"unknown subcommand {name!r}.{hint} See %speedkit help")
    command = COMMANDS[name]
    try:
        arguments = command.parse(rest)
        check_result_name(getattr(arguments, "v", None), names)
        hide_internal_frames(command.run)(names, session, arguments)
    except (UsageError, SpeedKitError) as error:
        if users_part(error):  # one of the user's own, of a class of ours
            raise
        text = str(error)
        raise UsageError(text if text[:1] == "%" else f"%speedkit {name}: {text}") from None
    except KeyboardInterrupt as error:  # no line of ours, nor of what the first one imports
        raise KeyboardInterrupt(str(error)) from None
