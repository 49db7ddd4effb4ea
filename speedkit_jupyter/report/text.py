"""Reports as plain text, within a terminal's width."""

from __future__ import annotations

import shutil
import textwrap

from speedkit_jupyter.report import text_table
from speedkit_jupyter.report.elements import Code, Content, Folded, Picture, Section, Table

# Without a terminal (a saved notebook, a pipe) this many columns.
WIDTH = 100


def render(document: Content) -> str:
    """The whole report."""
    width = max(60, shutil.get_terminal_size((WIDTH, 24)).columns)
    parts = ["\n".join(textwrap.wrap(document.headline, width))]
    shown = [section for section in document.sections if not isinstance(section.body, Picture)]
    parts += [_section(section, width, document.is_brief) for section in shown]
    return "\n\n".join(parts)


def _section(section: Section, width: int, is_brief: bool) -> str:
    body = section.body
    if isinstance(body, Table):
        text = text_table.render(body, width)
    elif isinstance(body, Code):
        text = body.text if body.language else textwrap.indent(body.text, "    ")
    elif isinstance(body, Folded) and is_brief and not body.title:
        text = f"… {body.summary}: in the result's report(), which -v NAME keeps"
    else:
        assert isinstance(body, str | Folded)
        lines = body if isinstance(body, str) else body.body
        if isinstance(lines, Table):
            return f"{body.summary}\n{text_table.render(lines, width)}"  # type: ignore[union-attr]
        text = "\n".join(textwrap.fill(line, width) for line in lines.splitlines())
    return f"{section.title}\n{text}" if section.title else text
