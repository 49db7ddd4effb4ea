"""Reports as HTML, and as a page that needs nothing else.

Styles are inline, since several front ends drop style sheets. Text takes the theme's own colour.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from speedkit_jupyter.report.elements import (
    BAD,
    GOOD,
    CodeBlock,
    Picture,
    Row,
    Section,
    Table,
    TableCell,
)

GREY, CHANGED = "#808080", "#388bfd"


def _rgba(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


# Backgrounds leave any text on them legible.
TONES = {
    "plain": "background:transparent;",
    "good": f"background:{_rgba(GOOD, 0.16)};",
    "bad": f"background:{_rgba(BAD, 0.16)};",
    "quiet": "opacity:.72;",
}
FRAME = "max-width:62em;line-height:1.45;font-size:13px;margin:4px 0"
# Digits of one width, so that a table that is redrawn each second does not move.
FIGURES = "font-variant-numeric:tabular-nums"
TABLE = f"border-collapse:collapse;margin:2px 0;font-size:13px;color:inherit;{FIGURES}"
CELL = "padding:3px 10px 3px 0;vertical-align:top;border:0;"
HEAD = f"{CELL}border-bottom:1px solid {_rgba(GREY, 0.45)};vertical-align:bottom;"
INLINE = "background:none;color:inherit"
ASKS = "text-decoration:underline dotted;text-underline-offset:3px;cursor:help"
MARKED = f"background:{_rgba(CHANGED, 0.2)};border-radius:3px;padding:0 5px;margin-left:-5px"
CODE = (
    f"background:{_rgba(GREY, 0.12)};border-left:3px solid {_rgba(GREY, 0.5)};padding:6px 10px;"
    "margin:4px 0;white-space:pre;overflow-x:auto;color:inherit;font-family:monospace"
)
# A line must not break inside an option.
OPTION = re.compile(r"--\w+( \d+)?")
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<body style="font-family:system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em">
{report}
<pre style="white-space:pre-wrap">{command}</pre>
<script type="application/json" id="data">
{data}
</script>
</body></html>
"""


def render(headline: str, sections: Sequence[Section], is_brief: bool) -> str:
    parts = "".join(_section(section, is_brief) for section in sections)
    title = f'<div style="font-weight:600;margin-bottom:6px">{_text(headline)}</div>'
    return f'<div class="speedkit" style="{FRAME}">{title}{parts}</div>'


def page(headline: str, report: str, data: str, command: str) -> str:
    """Return the page; it has the plain values as JSON under `data`."""
    # "<" could end a script element; in JSON strings it may be written like this.
    safe = data.replace("<", "\\u003c")
    return PAGE.format(title=escape(headline), report=report, command=escape(command), data=safe)


def _section(section: Section, is_brief: bool) -> str:
    title, body = _text(section.title), _body(section.body)
    if section.folded:
        summary = f'<summary style="cursor:pointer;opacity:.8">{_text(section.summary)}</summary>'
        opened = "" if is_brief else " open"
        return f'<details{opened} style="margin:4px 0">{summary}{body}</details>'
    return f'<div style="font-weight:600;margin:10px 0 2px">{title}</div>' * bool(title) + body


def _body(body: object) -> str:
    if isinstance(body, Table):
        return _table(body)
    if isinstance(body, CodeBlock):
        return f'<pre style="{CODE}">{escape(body.text)}</pre>'
    if isinstance(body, Picture):
        source = f"data:image/png;base64,{b64encode(body.png()).decode()}"
        alt = escape(body.text)
        return f'<img alt="{alt}" style="max-width:100%;width:48em" src="{source}">'
    lines = "".join(f"<div>{_text(line)}</div>" for line in str(body).splitlines())
    return f'<div style="margin:4px 0">{lines}</div>'


def _table(table: Table) -> str:
    head = ""
    for name in table.columns:
        style = f"{HEAD}text-align:{_side(table, name)};"
        title = _text(name).replace("-", "&#8209;")
        head += f'<th scope="col" style="{style}">{title}</th>'
    head = f"<thead><tr>{head}</tr></thead>" * any(table.columns)
    body = f"{head}<tbody>{''.join(_row(table, row) for row in table.rows)}</tbody>"
    return f'<div style="overflow-x:auto"><table style="{TABLE}">{body}</table></div>'


def _row(table: Table, row: Row) -> str:
    cells = ""
    for name, cell in zip(table.columns, row.cells, strict=True):
        space = "normal" if name in (table.columns[-1], *table.wraps) else "nowrap"
        style = f"{CELL}text-align:{_side(table, name)};white-space:{space};"
        cells += f'<td style="{style}">{_cell(cell, name in table.wraps)}</td>'
    return f'<tr style="{TONES[row.tone]}">{cells}</tr>'


def _cell(cell: str, wraps: bool) -> str:
    look = cell if isinstance(cell, TableCell) else TableCell("")
    if look.code:
        style = f"{INLINE};font-family:monospace;white-space:pre-wrap"
        return f'<code style="{style}">{escape(cell)}</code>'
    if look.hint:
        return f'<span title="{escape(look.hint)}" style="{ASKS}">{_text(cell)}</span>'
    if look.changed:
        return f'<strong class="speedkit-changed" style="{MARKED}">{_text(cell)}</strong>'
    text = OPTION.sub(r'<span style="white-space:nowrap">\g<0></span>', _text(cell))
    # Names as `bf16+channels_last` break too, intervals don't.
    return text.replace("+", "+<wbr>").replace(" to ", "&nbsp;to ") if wraps else text


def _side(table: Table, name: str) -> str:
    return "right" if name in table.numbers else "left"


def _text(text: str) -> str:
    """Escape a text; `code` in backticks becomes <code>."""
    if text.count("`") % 2:
        return escape(text)
    return re.sub("`([^`]*)`", rf'<code style="{INLINE}">\1</code>', escape(text))
