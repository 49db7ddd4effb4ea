"""Reports as plain text, within a terminal's width."""

from __future__ import annotations

import shutil
import textwrap

from speedkit_jupyter.report.document import Code, Document, Folded, Picture, Section, Table

GAP = "  "
# Without a terminal (a saved notebook, a pipe) this many columns.
WIDTH = 100


def render(document: Document) -> str:
    """The whole report."""
    width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns)
    parts = ["\n".join(textwrap.wrap(document.headline, width))]
    shown = [one for one in document.sections if not isinstance(one.body, Picture)]
    parts += [_section(section, width, document.is_brief) for section in shown]
    return "\n\n".join(parts)


def _section(section: Section, width: int, is_brief: bool) -> str:
    body = section.body
    if isinstance(body, Table):
        text = _table(body, width)
    elif isinstance(body, Code):
        text = body.text if body.language else textwrap.indent(body.text, "    ")
    elif isinstance(body, Folded) and is_brief:
        text = f"… {body.summary}: the result's report() has all"
    else:
        assert isinstance(body, str | Folded)
        lines = body if isinstance(body, str) else body.text
        text = "\n".join(textwrap.fill(line, width) for line in lines.splitlines())
    return f"{section.title}\n{text}" if section.title else text


def _table(table: Table, width: int) -> str:
    """Columns as wide as needed; the last one wraps."""
    cells = [table.columns, *(row.cells for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    widths[-1] = max(20, min(widths[-1], width - used))
    lines = [_row(row, widths, table) for row in cells]
    return "\n".join([lines[0], GAP.join("─" * one for one in widths), *lines[1:]])


def _row(row: tuple[str, ...], widths: list[int], table: Table) -> str:
    padded = [
        cell.rjust(width) if column in table.numbers else cell.ljust(width)
        for cell, width, column in zip(row[:-1], widths, table.columns, strict=False)
    ]
    last = textwrap.wrap(row[-1], widths[-1]) or [""]
    if table.columns[-1] in table.numbers:
        last = [line.rjust(widths[-1]) for line in last]
    lead = GAP.join(padded) + (GAP if padded else "")
    return "\n".join(
        (lead if number == 0 else " " * len(lead)) + line for number, line in enumerate(last)
    ).rstrip()
