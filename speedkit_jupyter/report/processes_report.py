"""What the workers are, and what each of them prints while a cell runs."""

from __future__ import annotations

from collections.abc import Sequence

from speedkit_jupyter.processes.workers import Printed, Workers
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Section, Table
from speedkit_jupyter.support.units import count, size

NONE = "No workers run: `%speedkit processes start 2` starts two"


def workers_report(workers: Workers | None) -> Document:
    """Return each rank with its process, state and memory."""
    if workers is None:
        return Document(NONE)
    rows = [
        (f"rank {rank}", f"process {pid}", size(used) if used else "on another host")
        for rank, (pid, used) in enumerate(zip(workers.pids, workers.memory_bytes(), strict=True))
    ]
    headline = f"{count(workers.size, 'worker')} connected by {workers.backend}"
    return Document(headline, [Table(("", "", "resident memory"), rows)])


def printed_report(title: str, printed: Sequence[Printed], stays: Sequence[str] = ()) -> Document:
    """Return what the ranks have printed: rank 0's open, the others' folded."""
    several = len(printed) > 1
    sections = [
        Section(Code(text), f"rank {one.rank}", folded=several and one.rank > 0)
        for one in printed
        if (text := _text(one))
    ]
    names = ", ".join(f"`{name}`" for name in stays)
    kept = f"Stays in the workers, for later cells: {names}" if stays else ""
    return Document(title, [*sections, kept])


def _text(printed: Printed) -> str:
    outputs = [str(one.get("text/plain", "")) for one in printed.outputs]
    return "\n".join(filter(None, [printed.text.rstrip(), *outputs]))
