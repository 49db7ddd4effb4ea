"""A table as plain text, within the width that there is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from speedkit_jupyter.report.elements import Row, Table

GAP = "  "


def render(table: Table, width: int) -> str:
    """Columns that may wrap are narrowed until all fits; then those that may go leave."""
    while (widths := _widths(table, width)) is None:
        table = _without(table, table.optional[-1])
    rows = [table.columns, *(row.cells for row in table.rows)]
    head, *lines = (_row(cells, widths, table) for cells in rows)
    rule = GAP.join("─" * size for size in widths)
    return "\n".join([head, rule, *lines] if any(table.columns) else lines)


def _widths(table: Table, width: int) -> list[int] | None:
    """None where it does not fit, and a column may go."""
    columns = list(zip(table.columns, *(row.cells for row in table.rows), strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    least = [
        max(len(piece.strip()) for cell in cells for piece in _pieces(cell))
        if name in table.wraps
        else natural
        for name, cells, natural in zip(table.columns, columns, widths, strict=True)
    ]
    least[-1] = min(widths[-1], table.least_last)
    room = width - len(GAP) * (len(widths) - 1)
    widths[-1] = max(least[-1], min(widths[-1], room - sum(widths[:-1])), 1)
    while sum(widths) > room:
        over = [i for i, size in enumerate(widths) if size > least[i]]
        if not over:
            return None if table.optional else widths
        widths[max(over, key=lambda i: widths[i] - least[i])] -= 1
    return widths


def _without(table: Table, name: str) -> Table:
    at = table.columns.index(name)

    def rest(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:at] + cells[at + 1 :]

    rows = tuple(Row(rest(row.cells), row.tone) for row in table.rows)
    return replace(table, columns=rest(table.columns), rows=rows, optional=table.optional[:-1])


def _row(cells: Sequence[str], widths: Sequence[int], table: Table) -> str:
    columns = [
        textwrap.wrap(cell, width) or [""] if number == len(widths) - 1 else _wrapped(cell, width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    lines = []
    for number in range(max(map(len, columns))):
        texts = [column[number] if number < len(column) else "" for column in columns]
        padded = [
            text.rjust(width) if name in table.numbers else text.ljust(width)
            for text, width, name in zip(texts, widths, table.columns, strict=True)
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
