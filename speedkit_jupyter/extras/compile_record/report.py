"""Reports about torch.compile: of the session, and of a cell's problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from speedkit_jupyter.extras.compile_record.history import CompileRecord, Finding, grouped
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.support.source_lines import Spot, place, source
from speedkit_jupyter.support.units import count, seconds

FINDINGS = ("what", "where", "why", "what to change")
MORE = "`%speedkit compile` shows the faults of the whole session."


def notice(findings: Sequence[Finding]) -> Document:
    """Return the report of a cell's new findings."""
    return Document(f"torch.compile: {_totals(findings)}", [_findings(findings), MORE])


def session_report(record: CompileRecord) -> Document:
    """Return the report of the session's compilations, with all findings."""
    if not (record.graphs or record.findings):
        return Document("torch.compile has compiled nothing in this session")
    hits, total = count(record.cache_hits, "cache hit"), seconds(record.total_s)
    words = [count(record.frames, "frame"), count(record.graphs, "graph"), total, hits]
    headline = f"torch.compile in this session: {', '.join(words)}; {_totals(record.findings)}"
    return Document(headline, [Section(_findings(record.findings), "What to change")])


def _totals(findings: Sequence[Finding]) -> str:
    kinds = Counter(one.kind for one in findings)
    told = [count(number, kind) for kind, number in kinds.items()]
    return ", ".join(told) or "no graph breaks, recompiles or fall-backs to act on"


def _findings(findings: Sequence[Finding]) -> Table:
    rows = [
        Row((f"{number} × {one.kind}" if number > 1 else one.kind, _line(one.spot),
             one.what, one.remedy or BLANK), "bad" if one.kind == "fall-back" else "plain")
        for one, number in grouped(findings)
    ]  # fmt: skip
    return Table(FINDINGS, rows, wraps=FINDINGS[1:3], least_last=30)


def _line(spot: Spot | None) -> str:
    """Return a finding's location and source, such as `cell 3, line 2: y = model(x)`."""
    return BLANK if spot is None else f"{place(spot)}: `{source(*spot)}`"
