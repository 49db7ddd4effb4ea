"""A measurement that runs: a line, and a table that keeps its place and its columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.measure.rounds.sampler import Progress, VariantStatus
from speedkit_jupyter.report.comparison_columns import BLANK, TONES
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.units import ratio

WIDTH = 24
COLUMNS = ("variant", "speed-up", INTERVAL, "state")


def live_report(progress: Progress, title: str = "") -> Document:
    """Return what notebooks and the panel show; without a title the bar is somebody else's."""
    sections = [Section(table) for table in _tables(progress.known)]
    if not title:
        return Document(progress.text, tuple(sections))
    line = Section(progress.text)
    return Document(f"{bar(progress.done)} {title}", (line, *sections))


def live_line(progress: Progress, title: str) -> str:
    """Return the same in one line of a terminal: with the best so far."""
    best = max(
        (standing for standing in progress.known if standing.state == "faster"),
        key=lambda standing: standing.speedup or 0.0,
        default=None,
    )
    ahead = "" if best is None or best.speedup is None else f"; {best.name} {ratio(best.speedup)}"
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


def _tables(known: Sequence[VariantStatus]) -> list[Table]:
    rows = tuple(_row(standing) for standing in known)
    return [Table(COLUMNS, rows, numbers=COLUMNS[1:3], wraps=COLUMNS[:1])] if rows else []


def _row(standing: VariantStatus) -> Row:
    low, high = standing.low, standing.high
    known = low and high is not None and not math.isinf(high)
    between = f"{low:.2f}× to {high:.2f}×" if known else BLANK
    gain = BLANK if standing.speedup is None else f"{standing.speedup:.2f}×"
    return Row((standing.name, gain, between, standing.state), TONES.get(standing.state, "plain"))
