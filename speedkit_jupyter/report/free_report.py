"""The report of memory that was let go."""

from __future__ import annotations

from speedkit_jupyter.freeing.freed import Freed, Held, Own
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.units import size
from speedkit_jupyter.support.words import count


def free_report(freed: Freed) -> Document:
    """What held memory, and who holds what is left."""
    sections = []
    if freed.let_go:
        rows = tuple(map(_held, freed.let_go))
        columns = ("held by", "held", "the largest of it", "gone with it")
        sections.append(Section(Table(columns, rows, columns[1:2], wraps=("the largest of it",))))
    if freed.kept:
        rows = tuple(map(_own, freed.kept))
        columns = ("name", "holds", "the largest of it", "remark")
        table = Table(columns, rows, columns[1:2], wraps=("the largest of it",))
        sections.append(Section(table, "Your own names, which were not touched"))
    sections.append(Section("\n".join(_lines(freed))))
    return Document(_headline(freed), tuple(sections), freed.to_dict())


def _headline(freed: Freed) -> str:
    if not freed.let_go:
        return "Nothing to let go of: only your own names hold tensors"
    before_bytes, after_bytes = freed.process_bytes
    given = max(sum(one.bytes for one in freed.let_go), before_bytes - after_bytes)
    device = "".join(
        f"; on {name} {size(before)} became {size(after)}"
        for name, (before, after) in freed.devices_bytes.items()
    )
    return f"Let go of {size(given)}{device}"


def _held(one: Held) -> Row:
    number = f", {count(one.number, 'value')}" if one.number else ""
    return Row((one.holder, size(one.bytes), f"{one.what}{number}", one.loses or "–"))


def _own(one: Own) -> Row:
    graphs = "–"
    if one.graphs:
        graphs = f"{count(one.graphs, 'tensor')} with a graph: .detach() lets go of what it keeps"
    return Row((one.name, size(one.bytes), one.what, graphs))


def _lines(freed: Freed) -> list[str]:
    before, after = freed.process_bytes
    lines = [f"This process: {size(before)} of main memory before, {size(after)} now."]
    if freed.let_go:
        lines.append(
            "The table counts tensors and arrays that Python knows of; what graphs kept beside "
            "them is gone too."
        )
    return lines
