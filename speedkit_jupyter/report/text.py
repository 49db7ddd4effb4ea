"""Reports as plain text, within a terminal's width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

from speedkit_jupyter.report.elements import Code, Picture, Section, Table

# Columns of a page without a terminal: a saved notebook, a pipe.
WIDTH = 100
GAP = "  "


class _Wrapper(textwrap.TextWrapper):
    """Break cells at blanks and behind a `+`, as in `bf16+channels_last`."""

    wordsep_simple_re = re.compile(r"([ \n]+)|(?<=\+)")


def render(headline: str, sections: Sequence[Section], is_brief: bool) -> str:
    """Return the whole report."""
    width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns)
    shown = [section for section in sections if not isinstance(section.body, Picture)]
    parts = [_section(section, width, is_brief) for section in shown]
    return "\n\n".join(["\n".join(textwrap.wrap(headline, width)), *parts])


def _section(section: Section, width: int, is_brief: bool) -> str:
    body = section.body
    if is_brief and section.folded and not section.title:
        return f"… {section.summary}: `%speedkit report --notes`, or the result's report()"
    if isinstance(body, Table):
        text = table(body, width)
    elif isinstance(body, Code):
        text = body.text if body.language else textwrap.indent(body.text, "    ")
    else:
        text = "\n".join(textwrap.fill(line, width) for line in body.splitlines())
    return f"{section.title}\n{text}" if section.title else text


def table(found: Table, width: int) -> str:
    """Return a table as text: columns that may wrap get narrower until all fit; then those that
    are optional go.
    """
    while (widths := _widths(found, width)) is None:
        found = found.without_last_optional()
    head, *lines = (
        _row(cells, widths, found) for cells in (found.columns, *(row.cells for row in found.rows))
    )
    rule = GAP.join("─" * size for size in widths)
    return "\n".join([head, rule, *lines] if any(found.columns) else lines)


def _widths(found: Table, width: int) -> list[int] | None:
    """The characters of each column; None where they don't fit and a column may go."""
    columns = list(zip(found.columns, *(row.cells for row in found.rows), strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    least = [
        max(len(word) for cell in cells for word in re.split(r"[ \n]+|(?<=\+)", cell))
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


def _row(cells: Sequence[str], widths: Sequence[int], found: Table) -> str:
    columns = [
        _Wrapper(max(size, 1), break_on_hyphens=False).wrap(cell)
        for cell, size in zip(cells, widths, strict=True)
    ]
    lines = []
    for number in range(max(1, *map(len, columns))):
        texts = [column[number] if number < len(column) else "" for column in columns]
        padded = [
            text.rjust(size) if name in found.numbers else text.ljust(size)
            for text, size, name in zip(texts, widths, found.columns, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)
