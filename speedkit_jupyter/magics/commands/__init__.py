"""The subcommands of `%speedkit`, in the order of help: a file and a line each."""

from __future__ import annotations

from speedkit_jupyter.magics.command import Command
from speedkit_jupyter.magics.commands import (
    advise,
    apply,
    catalog,
    code,
    config,
    explain,
    help,
    history,
    panel,
    repair,
    report,
    restore,
    status,
    tuned,
    verify,
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        status.COMMAND,
        report.COMMAND,
        apply.COMMAND,
        restore.COMMAND,
        advise.COMMAND,
        verify.COMMAND,
        tuned.COMMAND,
        catalog.COMMAND,
        explain.COMMAND,
        code.COMMAND,
        panel.COMMAND,
        history.COMMAND,
        config.COMMAND,
        repair.COMMAND,
    )
}
COMMANDS["help"] = help.of(COMMANDS)
