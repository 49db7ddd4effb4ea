"""The magic `%speedkit compile`, and notices about torch.compile after each cell."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from IPython.display import display

from speedkit_jupyter.extras.compile_record.history import CompileRecord, Finding, grouped
from speedkit_jupyter.notebook.options import Names, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.source_lines import place, source
from speedkit_jupyter.support.units import count, seconds
from speedkit_jupyter.support.weak import at_unload
from speedkit_jupyter.torchglue import dynamo

COMPILES = re.compile(r"\btorch\.compile\b|(?<!\bre)\.compile\(")


@cache
def session_record() -> CompileRecord:
    """Return the only record of this process: torch's own records are also per process."""
    return CompileRecord()


@command("the work of torch.compile in this session: seconds, graph breaks, recompiles")
def compile(names: Names, session: Session, arguments: Namespace) -> None:
    record = session_record()
    record.collect()
    if not (record.graphs or record.findings):
        display(Document("torch.compile has compiled nothing in this session"))
        return
    hits, total = count(record.cache_hits, "cache hit"), seconds(record.total_s)
    words = [count(record.frames, "frame"), count(record.graphs, "graph"), total, hits]
    headline = f"torch.compile in this session: {', '.join(words)}; {_totals(record.findings)}"
    display(Document(headline, [Section(_findings(record.findings), "What to change")]))


def watch(shell: Any) -> None:
    """Show new problems of torch.compile now, and after each cell, until SpeedKit is unloaded."""

    def before_cell(info: Any = None) -> None:
        # The cell would load Dynamo: load it now, so that the first compilation is noted.
        if COMPILES.search(str(getattr(info, "raw_cell", ""))):
            dynamo.dynamo_config()
        if dynamo.is_dynamo_loaded():
            session_record().listen()
            session_record().collect()

    def after_cell(result: Any = None) -> None:
        findings = session_record().news() if dynamo.is_dynamo_loaded() else []
        if findings and messages.verbosity() != "quiet":
            headline = f"torch.compile: {_totals(findings)}"
            display(Document(headline, [_findings(findings), MORE]))

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


# --- reports ---

FINDINGS = ("what", "where", "why", "what to change")
MORE = "`%speedkit compile` shows the faults of the whole session."


def _totals(findings: Sequence[Finding]) -> str:
    kinds = Counter(one.kind for one in findings)
    told = [count(number, kind) for kind, number in kinds.items()]
    return ", ".join(told) or "no graph breaks, recompiles or fall-backs to act on"


def _findings(findings: Sequence[Finding]) -> Table:
    rows = [
        Row((f"{number} × {one.kind}" if number > 1 else one.kind,
             f"{place(one.spot)}: `{source(*one.spot)}`" if one.spot else BLANK,
             one.what, one.remedy or BLANK), "bad" if one.kind == "fall-back" else "plain")
        for one, number in grouped(findings)
    ]  # fmt: skip
    return Table(FINDINGS, rows, wraps=FINDINGS[1:3], least_last=30)
