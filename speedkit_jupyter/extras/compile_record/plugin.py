"""%speedkit compile, and notices about torch.compile after each cell."""

from __future__ import annotations

import re
from argparse import Namespace
from contextlib import suppress
from functools import cache
from typing import Any

from IPython.display import display

from speedkit_jupyter.extras.compile_record import report
from speedkit_jupyter.extras.compile_record.history import CompileRecord
from speedkit_jupyter.notebook.options import Names, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.weak import at_unload
from speedkit_jupyter.torchglue import dynamo

COMPILES = re.compile(r"\btorch\.compile\b|(?<!\bre)\.compile\(")


@cache
def session_record() -> CompileRecord:
    """Return the record of this process; torch has one record of compilations, too."""
    return CompileRecord()


@command("the work of torch.compile in this session: seconds, graph breaks, recompiles")
def compile(names: Names, session: Session, arguments: Namespace) -> None:
    session_record().collect()
    display(report.session_report(session_record()))


def watch(shell: Any) -> None:
    """Show problems of compiling after each cell of a shell, including the running cell."""

    def before_cell(info: Any = None) -> None:
        # Cells that compile load Dynamo themselves.
        if COMPILES.search(str(getattr(info, "raw_cell", ""))):
            dynamo.dynamo_config()
        if dynamo.is_dynamo_loaded():
            session_record().listen()
            session_record().collect()

    def after_cell(result: Any = None) -> None:
        findings = session_record().news() if dynamo.is_dynamo_loaded() else []
        if findings and messages.verbosity() != "quiet":
            display(report.notice(findings))

    def end() -> None:
        for name, call in events.items():
            with suppress(ValueError):
                shell.events.unregister(name, call)
        session_record().end()

    events = {"pre_run_cell": before_cell, "post_run_cell": after_cell}
    for name, call in events.items():
        shell.events.register(name, call)
    at_unload(end)
    after_cell()


PLUGIN = Plugin([compile], begin=watch)
