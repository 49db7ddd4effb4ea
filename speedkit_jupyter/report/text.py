"""Reports as plain text, within a terminal's width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from speedkit_jupyter.report.elements import Code, Content, Folded, Picture, Row, Section, Table

# Without a terminal (a saved notebook, a pipe) this many columns.
WIDTH = 100
GAP = "  "


def render(document: Content) -> str:
    """Return the whole report."""
    width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns)
    parts = ["\n".join(textwrap.wrap(document.headline, width))]
    shown = [section for section in document.sections if not isinstance(section.body, Picture)]
    parts += [_section(section, width, document.is_brief) for section in shown]
    return "\n\n".join(parts)


def _section(section: Section, width: int, is_brief: bool) -> str:
    folded = section.body if isinstance(section.body, Folded) else None
    if folded is not None and is_brief and not folded.title:
        return f"… {folded.summary}: in the result's report(), which -v NAME keeps"
    title = section.title if folded is None else folded.title
    body = section.body if folded is None else folded.body
    assert not isinstance(body, Picture | Folded)
    if isinstance(body, Table):
        text = table(body, width)
    elif isinstance(body, Code):
        text = body.text if body.language else textwrap.indent(body.text, "    ")
    else:
        text = "\n".join(textwrap.fill(line, width) for line in body.splitlines())
    return f"{title}\n{text}" if title else text


def table(found: Table, width: int) -> str:
    """Return a table as text: columns that may wrap are narrowed until all fits; then those that
    may go leave.
    """
    while (widths := _widths(found, width)) is None:
        found = _without(found, found.optional[-1])
    rows = [found.columns, *(row.cells for row in found.rows)]
    head, *lines = (_row(cells, widths, found) for cells in rows)
    rule = GAP.join("─" * size for size in widths)
    return "\n".join([head, rule, *lines] if any(found.columns) else lines)


def _widths(found: Table, width: int) -> list[int] | None:
    """None where it does not fit, and a column may go."""
    columns = list(zip(found.columns, *(row.cells for row in found.rows), strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    least = [
        max(len(piece.strip()) for cell in cells for piece in _pieces(cell))
        if name in found.wraps
        else natural
        for name, cells, natural in zip(found.columns, columns, widths, strict=True)
    ]
    least[-1] = min(widths[-1], found.least_last)
    room = width - len(GAP) * (len(widths) - 1)
    widths[-1] = max(least[-1], min(widths[-1], room - sum(widths[:-1])), 1)
    while sum(widths) > room:
        over = [i for i, size in enumerate(widths) if size > least[i]]
        if not over:
            return None if found.optional else widths
        widths[max(over, key=lambda i: widths[i] - least[i])] -= 1
    return widths


def _without(found: Table, name: str) -> Table:
    at = found.columns.index(name)

    def rest(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:at] + cells[at + 1 :]

    rows = tuple(Row(rest(row.cells), row.tone) for row in found.rows)
    return replace(found, columns=rest(found.columns), rows=rows, optional=found.optional[:-1])


def _row(cells: Sequence[str], widths: Sequence[int], found: Table) -> str:
    columns = [
        textwrap.wrap(cell, width) or [""] if number == len(widths) - 1 else _wrapped(cell, width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    lines = []
    for number in range(max(map(len, columns))):
        texts = [column[number] if number < len(column) else "" for column in columns]
        padded = [
            text.rjust(width) if name in found.numbers else text.ljust(width)
            for text, width, name in zip(texts, widths, found.columns, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def _wrapped(cell: str, width: int) -> list[str]:
    """Broken at blanks and behind a `+`."""
    lines = [""]
    for piece in _pieces(cell):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append(piece.lstrip())
        else:
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(cell: str) -> list[str]:
    return re.findall(r"\s*[^\s+]*\+|\s*[^\s+]+", cell) or [cell]
