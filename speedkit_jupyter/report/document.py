"""A report that every front end can show, and its text within a terminal's width."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from speedkit_jupyter.report import html
from speedkit_jupyter.report.elements import CodeBlock, Picture, Section, Table

# Columns of a page without a terminal: a saved notebook, a pipe.
WIDTH = 100
GAP = "  "


@dataclass(frozen=True)
class Document:
    """A headline with its content: sections, or bodies without a title. Empty ones are left out.

    `data` is a result's plain values, for a page; a brief one shows summaries of what is folded.
    """

    headline: str
    content: Sequence[Any] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_brief: bool = False

    @property
    def sections(self) -> list[Section]:
        every = (one if isinstance(one, Section) else Section(one) for one in self.content)
        return [section for section in every if section]

    def brief(self) -> Document:
        return replace(self, is_brief=True)

    def and_lines(self, lines: Sequence[str]) -> Document:
        return replace(self, content=[*self.content, "\n".join(lines)])

    def to_text(self) -> str:
        return _text(self)

    def to_html(self) -> str:
        """Return it for notebooks; readable on light and dark themes."""
        return html.render(self.headline, self.sections, self.is_brief)

    def to_page(self) -> str:
        """Return a whole HTML page with the plain values in it, raw samples too."""
        command = str(self.data.get("command") or "")
        data = json.dumps(dict(self.data), indent=2, default=str)
        return html.page(self.headline, self.to_html(), data, command)

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}


class _Wrapper(textwrap.TextWrapper):
    """Break cells at blanks and behind a `+`, as in `bf16+channels_last`."""

    wordsep_simple_re = re.compile(r"([ \n]+)|(?<=\+)")


def _text(document: Document) -> str:
    width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns)
    shown = [section for section in document.sections if not isinstance(section.body, Picture)]
    parts = [_section(section, width, document.is_brief) for section in shown]
    return "\n\n".join(["\n".join(textwrap.wrap(document.headline, width)), *parts])


def _section(section: Section, width: int, is_brief: bool) -> str:
    body = section.body
    if is_brief and section.folded and not section.title:
        return f"… {section.summary}: `%speedkit report --notes`, or the result's report()"
    if isinstance(body, Table):
        text = table(body, width)
    elif isinstance(body, CodeBlock):
        text = body.text if body.is_file else textwrap.indent(body.text, "    ")
    else:
        text = "\n".join(textwrap.fill(line, width) for line in body.splitlines())
    return f"{section.title}\n{text}" if section.title else text


def table(found: Table, width: int) -> str:
    """Return a table as text: columns that may wrap get narrower, then the optional ones go."""
    while (widths := _widths(found, width)) is None:
        found = found.without_last_optional()
    every = (found.columns, *(row.cells for row in found.rows))
    head, *lines = (_row(cells, widths, found) for cells in every)
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
    sides = [">" if name in found.numbers else "<" for name in found.columns]
    lines = []
    for texts in zip_longest(*columns, fillvalue=""):
        padded = map("{:{}{}}".format, texts, sides, widths)
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)
