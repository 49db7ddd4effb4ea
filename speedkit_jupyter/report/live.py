"""A measurement that runs: a line, and a table that keeps its place and its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.measure.rounds.sampler import Progress, VariantStatus
from speedkit_jupyter.report.comparison_report import TONES
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Row, Table
from speedkit_jupyter.report.units import ratio

WIDTH = 24
COLUMNS = ("variant", "speed-up", INTERVAL, "state")


def live_report(progress: Progress, title: str = "") -> Document:
    """Return what notebooks and the panel show; without a title the bar is somebody else's."""
    rows = [_row(status) for status in progress.known]
    table = Table(COLUMNS, rows, numbers=COLUMNS[1:3], wraps=COLUMNS[:1])
    if not title:
        return Document(progress.text, [table])
    return Document(f"{bar(progress.done)} {title}", [progress.text, table])


def live_line(progress: Progress, title: str) -> str:
    """Return the same in one line of a terminal: with the best so far."""
    faster = {s.name: s.speedup or 0.0 for s in progress.known if s.state == "faster"}
    best = max(faster, key=lambda name: faster[name], default=None)
    ahead = "" if best is None else f"; {best} {ratio(faster[best])}"
    return f"{bar(progress.done)} {title}: {progress.text}{ahead}"


def waiting(progress: Progress, names: Sequence[str]) -> Progress:
    """Return the progress with a row for each variant from the start: the table grows no more."""
    if progress.known or len(names) < 2:
        return progress
    state = "measuring" if progress.done > 0 else "waiting"
    rows = tuple(VariantStatus(name, None, None, None, state) for name in names)
    return replace(progress, known=rows)


def bar(done: float) -> str:
    """Return `██████░░░░`; never full, since something is left."""
    filled = min(round(done * WIDTH), WIDTH - 1)
    return f"{'█' * filled}{'░' * (WIDTH - filled)}"


def _row(status: VariantStatus) -> Row:
    low, high, speedup = status.low, status.high, status.speedup
    is_known = low and high is not None and high < float("inf")
    between = f"{low:.2f}× to {high:.2f}×" if is_known else BLANK
    gain = BLANK if speedup is None else f"{speedup:.2f}×"
    return Row((status.name, gain, between, status.state), TONES.get(status.state, "plain"))
