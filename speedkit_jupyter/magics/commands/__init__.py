"""The subcommands of `%speedkit`, in the order of help: a file and a line each."""

from __future__ import annotations

from speedkit_jupyter.magics.command import Command
from speedkit_jupyter.magics.commands import (
    advise,
    apply,
    batch,
    catalog,
    code,
    config,
    explain,
    free,
    help,
    history,
    loader,
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
        loader.COMMAND,
        batch.COMMAND,
        verify.COMMAND,
        tuned.COMMAND,
        catalog.COMMAND,
        explain.COMMAND,
        code.COMMAND,
        panel.COMMAND,
        history.COMMAND,
        config.COMMAND,
        free.COMMAND,
        repair.COMMAND,
    )
}
COMMANDS["help"] = help.of(COMMANDS)
