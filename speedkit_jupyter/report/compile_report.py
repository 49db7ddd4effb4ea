"""Reports of what torch.compile did in a session, and of its faults after a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from speedkit_jupyter.plans.compile_history import Compiled, Finding, History, grouped
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Section, Table
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.support.source_lines import Spot, cells, source
from speedkit_jupyter.support.units import count, seconds

NOTHING = "torch.compile has compiled nothing in this session"
FINDINGS = ("what", "where", "why", "what to change")
COMPILED = ("compiled", "where", "times", "recompiles", "seconds", "cache hits")
KINDS = ("graph break", "recompile", "fall-back")
MORE = "`%speedkit compile` shows all that was compiled."


def notice(findings: Sequence[Finding]) -> Document:
    """Return the faults of code that a cell has compiled, with their lines and remedies."""
    return Document(f"torch.compile: {_totals(findings)}", [_findings(findings, cells()), MORE])


def compiled_line(subject: str, took_s: float) -> Document:
    """Return the line that replaces the live line once a cell has ended."""
    return Document(f"Compiled {subject} in {seconds(took_s)}")


def compiling_progress(so_far_s: float, expected_s: float | None) -> Progress:
    """Return the progress of compiling, by the seconds of the last time if they are known."""
    last = f"; the last time it took {seconds(expected_s)}" if expected_s else ""
    return Progress(so_far_s / expected_s if expected_s else 0.0, f"{so_far_s:.0f} s so far{last}")


def history_report(history: History) -> Document:
    """Return everything that was compiled in the session, and every fault."""
    every, found = history.compiled, history.findings
    if not (every or found):
        return Document(NOTHING)
    graphs = sum(one.has_graph for one in every)
    frames = sum(bool(one.function) for one in every)
    total = seconds(sum(one.seconds for one in every))
    hits = sum(one.hits for one in every)
    words = [count(frames, "frame"), count(graphs, "graph"), total, count(hits, "cache hit")]
    headline = f"torch.compile in this session: {', '.join(words)}; {_totals(found)}"
    names = cells()
    remedies = Section(_findings(found, names), "What to change")
    return Document(headline, [_compiled(every, names), remedies])


def _totals(findings: Sequence[Finding]) -> str:
    kinds = [one.kind for one in findings]
    others = sorted({*kinds} - {*KINDS})
    told = [count(kinds.count(kind), kind) for kind in KINDS if kind in kinds]
    told += [f"{kinds.count(kind)} {kind}" for kind in others]
    return ", ".join(told) or "no graph breaks, recompiles or fall-backs to act on"


def _findings(findings: Sequence[Finding], names: Mapping[str, str]) -> Table:
    rows = [
        Row((f"{number} × {one.kind}" if number > 1 else one.kind, _place(one.spot, names),
             one.what, one.remedy or BLANK), "bad" if one.kind == "fall-back" else "plain")
        for one, number in grouped(findings)
    ]  # fmt: skip
    return Table(FINDINGS, rows, wraps=FINDINGS[1:3], least_last=30)


def _compiled(every: Sequence[Compiled], names: Mapping[str, str]) -> Table:
    """Return a row for each function; backward passes that were compiled later have one row."""
    groups: dict[tuple[str, Spot | None], list[Compiled]] = {}
    for one in every:
        groups.setdefault((one.function, one.spot if one.function else None), []).append(one)
    rows = [
        (
            function or "backward passes",
            _place(spot, names),
            str(len(same)),
            str(sum(one.is_recompile for one in same)),
            seconds(sum(one.seconds for one in same)),
            str(sum(one.hits for one in same)),
        )
        for (function, spot), same in groups.items()
    ]
    return Table(COMPILED, rows, COMPILED[2:], wraps=COMPILED[:2])


def _place(spot: Spot | None, names: Mapping[str, str]) -> str:
    """Return `cell 3, line 2: y = model(x)`."""
    if spot is None:
        return BLANK
    file = names.get(spot.file) or spot.file.rpartition("/")[2]
    return f"{file}, line {spot.number}: `{source(*spot)}`"
