"""Reports of what torch.compile did in a session, and of its faults after a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from speedkit_jupyter.plans.compile_history import Finding, History, grouped
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.support.source_lines import Spot, cells, source
from speedkit_jupyter.support.units import count, seconds

FINDINGS = ("what", "where", "why", "what to change")
MORE = "`%speedkit compile` shows the faults of the whole session."


def notice(findings: Sequence[Finding]) -> Document:
    return Document(f"torch.compile: {_totals(findings)}", [_findings(findings, cells()), MORE])


def history_report(history: History) -> Document:
    """Return the work of torch.compile in the session, and every fault."""
    if not (history.graphs or history.findings):
        return Document("torch.compile has compiled nothing in this session")
    hits, total = count(history.cache_hits, "cache hit"), seconds(history.total_s)
    words = [count(history.frames, "frame"), count(history.graphs, "graph"), total, hits]
    headline = f"torch.compile in this session: {', '.join(words)}; {_totals(history.findings)}"
    remedies = Section(_findings(history.findings, cells()), "What to change")
    return Document(headline, [remedies])


def _totals(findings: Sequence[Finding]) -> str:
    kinds = Counter(one.kind for one in findings)
    told = [count(number, kind) for kind, number in kinds.items()]
    return ", ".join(told) or "no graph breaks, recompiles or fall-backs to act on"


def _findings(findings: Sequence[Finding], names: Mapping[str, str]) -> Table:
    rows = [
        Row((f"{number} × {one.kind}" if number > 1 else one.kind, _place(one.spot, names),
             one.what, one.remedy or BLANK), "bad" if one.kind == "fall-back" else "plain")
        for one, number in grouped(findings)
    ]  # fmt: skip
    return Table(FINDINGS, rows, wraps=FINDINGS[1:3], least_last=30)


def _place(spot: Spot | None, names: Mapping[str, str]) -> str:
    """Return `cell 3, line 2: y = model(x)`."""
    if spot is None:
        return BLANK
    file = names.get(spot.file) or spot.file.rpartition("/")[2]
    return f"{file}, line {spot.number}: `{source(*spot)}`"
