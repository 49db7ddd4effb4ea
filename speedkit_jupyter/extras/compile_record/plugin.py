"""%speedkit compile, and the faults of torch.compile after each cell."""

from __future__ import annotations

import re
from argparse import Namespace
from contextlib import suppress
from functools import cache
from typing import Any

from IPython.display import display

from speedkit_jupyter.extras.compile_record import report
from speedkit_jupyter.extras.compile_record.record import CompileRecord
from speedkit_jupyter.notebook.options import Names, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.weak import at_unload
from speedkit_jupyter.torchglue import dynamo

COMPILES = re.compile(r"\btorch\.compile\b|(?<!\bre)\.compile\(")


@cache
def session_record() -> CompileRecord:
    """Return the one record of this process, as torch has one record of compilations."""
    return CompileRecord()


@command("the work of torch.compile in this session: seconds, graph breaks, recompiles")
def compile(names: Names, session: Session, arguments: Namespace) -> None:
    session_record().collect()
    display(report.session_report(session_record()))


def watch(shell: Any) -> None:
    """Show the faults of compiling after each cell of a shell, the running one included."""

    def before_cell(info: Any = None) -> None:
        # A cell that is about to compile loads Dynamo anyway.
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
