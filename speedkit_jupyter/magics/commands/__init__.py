"""The subcommands of `%speedkit`, in the order of help, and the line that names one."""

from __future__ import annotations

from IPython.core.error import UsageError

from speedkit_jupyter.magics.commands import kept, plans, steps
from speedkit_jupyter.magics.options import Command, split, without_comment
from speedkit_jupyter.support.exceptions import did_you_mean

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        plans.status,
        plans.report,
        plans.apply,
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
        kept.free,
        kept.verbosity,
    )
}
COMMANDS["help"] = kept.help_command(COMMANDS)


def selected(line: str) -> tuple[Command, str]:
    """Return the command of a `%speedkit` line and the rest of the line; raises UsageError."""
    line = without_comment(line).strip()
    typed = split(line)
    name = typed[0] if typed and not typed[0].startswith("-") else "status"
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UsageError(f"unknown subcommand {name!r}.{hint} See %speedkit help")
    return COMMANDS[name], line.removeprefix(name)
