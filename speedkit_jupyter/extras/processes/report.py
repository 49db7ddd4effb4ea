"""What the workers are, and what each of them prints while a cell runs."""

from __future__ import annotations

from collections.abc import Sequence

from speedkit_jupyter.extras.processes.race import SINGLE, StrategyRow
from speedkit_jupyter.extras.processes.workers import Printed, Workers
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, CodeBlock, Section, Table
from speedkit_jupyter.support.units import between, count, ratio, share, size

EQUALITY = {True: "(equal)", False: "(other)", None: ""}
HOW = (
    "Throughput counts the batches of all processes. Of a step's time for communication, computing "
    "hides what is overlapped, and not what is exposed. State is what a rank holds of parameters, "
    "gradients and optimizer state. Every rank had the same batch, so the losses have to be equal."
)
# Characters of a rank that are shown, the last ones: a page is drawn anew ten times a second.
MOST = 50_000
ENDED = "has ended: `%speedkit processes start` starts all anew"
NONE = "No workers run: `%speedkit processes start 2` starts two"


def workers_report(workers: Workers | None) -> Document:
    """Return each rank with its process, and which have ended."""
    if workers is None:
        return Document(NONE)
    dead = workers.dead()
    rows = [
        (f"rank {rank}", ENDED if rank in dead else f"process {pid}")
        for rank, pid in enumerate(workers.pids)
    ]
    headline = f"{count(workers.size, 'worker')} connected by {workers.backend}"
    return Document(headline, [Table(("", ""), rows)])


def printed_report(title: str, printed: Printed, stays: Sequence[str] = ()) -> Document:
    """Return what the ranks have printed: rank 0's open, the others' folded."""
    sections = [
        Section(CodeBlock(_end(text)), f"rank {rank}", folded=len(printed) > 1 and rank > 0)
        for rank, text in printed.items()
        if text
    ]
    names = ", ".join(f"`{name}`" for name in stays)
    kept = f"Stays in the workers, for later cells: {names}" if stays else ""
    return Document(title, [*sections, kept])


COLUMNS = (
    *("", "throughput", "95 % interval", "efficiency", "exposed", "overlapped", "skew"),
    *("state", "loss"),
)


def race_report(found: Sequence[StrategyRow]) -> Document:
    """Return what several processes are worth beside one, and what to do."""
    others = [row for row in found if row.strategy != SINGLE]
    best = max(others, key=lambda row: row.efficiency.low)
    low, middle, high = _throughput(best)
    headline = f"{best.ranks} processes ({best.strategy}) are {ratio(middle)}, {between(low, high)}"
    if low <= 1 or best.is_equal is False:
        headline = f"Leave it at one process: {best.ranks} are not proven faster"
    rows = [
        (
            row.strategy,
            ratio(_throughput(row)[1]),
            BLANK if row.strategy == SINGLE else between(*_throughput(row)[::2]),
            share(row.efficiency.median),
            share(row.exposed),
            share(row.overlapped),
            share(row.skew),
            size(row.memory_bytes),
            BLANK if row.loss is None else f"{row.loss:.5g} {EQUALITY[row.is_equal]}".strip(),
        )
        for row in found
    ]
    return Document(headline, [Table(COLUMNS, rows), HOW])


def _throughput(row: StrategyRow) -> tuple[float, float, float]:
    times = row.efficiency
    return row.ranks * times.low, row.ranks * times.median, row.ranks * times.high


def _end(text: str) -> str:
    if len(text) <= MOST:
        return text
    return f"… the last {MOST:,} of {len(text):,} characters:\n{text[-MOST:]}"
