"""Reports as HTML, and as a page that needs nothing else.

Styles are inline, since several front ends drop style sheets. Text takes the theme's own colour;
the other colours are legible on white and near-black.
"""

from __future__ import annotations

import re
from base64 import b64encode
from html import escape

from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.report.colours import (
    BAD,
    CHANGED,
    COMMENT,
    GOOD,
    GREY,
    KEYWORD,
    NUMBER,
    STRING,
    rgba,
    tint,
)
from speedkit_jupyter.report.elements import (
    Changed,
    Code,
    Content,
    Folded,
    Hinted,
    Picture,
    Row,
    Section,
    Source,
    Table,
)

HINTS = {
    "variant": "A plan that was measured: its parts, joined by +; baseline is your code as it is",
    "verdict": (
        "faster, slower: proven by the interval; no gain: it takes as long, within 2 %; "
        "too noisy: the interval is too wide to tell; wrong: the results are off by more "
        "than rounding explains; not checked: the results could not be compared"
    ),
    "median": "Half of the timed steps took less, half took more",
    "speed-up": "Baseline time over the variant's time, in pairs of steps: 2× is twice as fast",
    INTERVAL: "The range in which the true value lies, in 95 of 100 such measurements; if it "
    "contains 1×, there may be no gain at all",
    "first call": "How long the first step took: compiling and other work that is done once",
    "memory": "Memory of model and optimizer, and what the step needs beyond it at its peak",
    "of limit": "The least time that this machine needs for the arithmetic or the memory traffic, "
    "as a share of the time that was taken: 100 % can't be made faster",
    "accuracy": (
        "Against the same step in float64. as exact: no further from it than the baseline is; "
        "rounding 0.05: off by a relative 0.05 at most, which the lower precision explains; "
        "wrong: off by more than rounding explains; changed: it changes the results on purpose"
    ),
    "state": "on: in force; as is: left alone; declined: it was asked for and can't be done here",
    "value": "The setting, in the words that the options take",
    "by": "Who decided: auto (a rule), you, the environment, or a measurement (measured)",
    "part": "A part of the step, or of the plan",
    "share": "Of the time of the whole step",
    "of a step": "How long it takes within one step",
    "backward": "The share of it that is the backward pass",
    "operations": "Floating-point operations of products, convolutions and attention",
    "moves": "Bytes of the tensors that are read and written",
    "waiting": "The share of the time in which the step waits for the next batch",
    "expected, whole step": "How many times as fast the step could be, by the share of the time "
    "that the remedy concerns",
    "gone with it": "What you can't use any more after letting go",
}
# Whose cells have the tooltip, too.
ASKED = ("verdict", "accuracy", "of limit")
TONES = {
    "plain": "",
    "good": tint(GOOD, ".16"),
    "bad": tint(BAD, ".16"),
    "quiet": "opacity:.72;",
}
FRAME = "max-width:62em;line-height:1.45;font-size:13px;margin:4px 0"
# Figures of one width, so that a table that is drawn anew each second stands still.
FIGURES = "font-size:13px;color:inherit;font-variant-numeric:tabular-nums"
CELL = "padding:3px 10px 3px 0;vertical-align:top;border:0;"
RULE = f"border-bottom:1px solid {rgba(GREY, '.45')};"
# An option is no place to break a line.
OPTION = re.compile(r"--\w+( \d+)?")
MARKED = tint(CHANGED, ".2") + "border-radius:3px;padding:0 5px;margin-left:-5px"
MONOSPACED = "background:none;color:inherit;font-family:monospace;white-space:pre-wrap"
# What a tooltip explains.
ASKS = ";text-decoration:underline dotted;text-underline-offset:3px;cursor:help"
FOLDED = 'style="margin:4px 0"'
CODE = (
    f"{tint(GREY, '.12')}border-left:3px solid {rgba(GREY, '.5')};"
    "padding:6px 10px;margin:4px 0;white-space:pre;overflow-x:auto;color:inherit;"
    "font-family:monospace"
)


def render(document: Content) -> str:
    """Return the whole report as one `<div>`."""
    parts = [f'<div style="font-weight:600;margin-bottom:6px">{_text(document.headline)}</div>']
    parts += [_section(section, document.is_brief) for section in document.sections]
    return f'<div class="speedkit" style="{FRAME}">{"".join(parts)}</div>'


def _section(section: Section, is_brief: bool) -> str:
    title = (
        f'<div style="font-weight:600;margin:10px 0 2px">{_text(section.title)}</div>'
        if section.title
        else ""
    )
    body = section.body
    if isinstance(body, Table):
        return title + _table(body)
    if isinstance(body, Code):
        return f'{title}<pre style="{CODE}">{_coloured(body)}</pre>'
    if isinstance(body, Picture):
        source = f"data:image/png;base64,{b64encode(body.png()).decode()}"
        alt = escape(body.text)
        return f'{title}<img alt="{alt}" style="max-width:100%;width:48em" src="{source}">'
    if isinstance(body, Folded):
        summary = f'<summary style="cursor:pointer;opacity:.8">{_text(body.summary)}</summary>'
        opened = "" if is_brief else " open"
        inside = _table(body.body) if isinstance(body.body, Table) else _lines(body.body)
        return f"{title}<details{opened} {FOLDED}>{summary}{inside}</details>"
    return title + _lines(body)


def _lines(text: str) -> str:
    lines = "".join(f"<div>{_text(line)}</div>" for line in text.splitlines())
    return f'<div style="margin:4px 0">{lines}</div>'


def _coloured(code: Code) -> str:
    """By Pygments, where the language is known; in colours for light and dark themes."""
    if not code.language:
        return escape(code.text)
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.style import Style
    from pygments.token import Comment, Keyword, Literal, String

    class Readable(Style):  # type: ignore[misc]
        styles = {
            Comment: f"italic {COMMENT}", Keyword: KEYWORD, String: STRING,
            Literal.Number: NUMBER,
        }  # fmt: skip

    formatter = HtmlFormatter(nowrap=True, noclasses=True, style=Readable)
    return str(highlight(code.text, get_lexer_by_name(code.language), formatter)).rstrip("\n")


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_title(HINTS.get(name, ""))} style="{CELL}{RULE}'
        f'text-align:{_side(table, name)};vertical-align:bottom{ASKS if name in HINTS else ""}">'
        f"{_text(name).replace('-', '&#8209;')}</th>"
        for name in table.columns
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = "".join(_row(table, row) for row in table.rows)
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:2px 0;'
        f'{FIGURES}">{head}<tbody>{rows}</tbody></table></div>'
    )


def _row(table: Table, row: Row) -> str:
    cells = "".join(
        f'<td{_title(HINTS[name] if name in ASKED else "")} style="{CELL}{_align(table, name)}">'
        f"{_cell(cell, name in table.wraps)}</td>"
        for name, cell in zip(table.columns, row.cells, strict=True)
    )
    return f'<tr style="{TONES[row.tone] or "background:transparent;"}">{cells}</tr>'


def _cell(cell: str, wraps: bool) -> str:
    """Where it wraps, names as `bf16+channels_last` break too."""
    if isinstance(cell, Source):
        return f'<code style="{MONOSPACED}">{escape(cell)}</code>'
    if isinstance(cell, Hinted):
        return f'<span{_title(cell.hint)} style="{ASKS[1:]}">{_text(cell)}</span>'
    if not isinstance(cell, Changed):
        text = OPTION.sub(r'<span style="white-space:nowrap">\g<0></span>', _text(cell))
        return text.replace("+", "+<wbr>").replace(" to ", "&nbsp;to ") if wraps else text
    return f'<strong class="speedkit-changed" style="{MARKED}">{_text(cell)}</strong>'


def _title(hint: str) -> str:
    return f' title="{escape(hint)}"' if hint else ""


def _align(table: Table, name: str) -> str:
    """The last column, which explains, breaks into lines."""
    wraps = "normal" if name == table.columns[-1] or name in table.wraps else "nowrap"
    return f"text-align:{_side(table, name)};white-space:{wraps};"


def _side(table: Table, name: str) -> str:
    """Numbers stand at the right."""
    return "right" if name in table.numbers else "left"


def _text(text: str) -> str:
    """Escaped; `code` in backticks becomes <code>."""
    pieces = escape(text).split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return "".join(
        f'<code style="background:none;color:inherit">{piece}</code>' if i % 2 else piece
        for i, piece in enumerate(pieces)
    )


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; }}
pre {{ white-space: pre-wrap; }}
</style>
</head>
<body>
{report}
{repeat}
<script type="application/json" id="data">
{data}
</script>
</body>
</html>
"""


def page(document: Content) -> str:
    """Return the page; the plain values, raw samples too, lie in it as JSON under `data`."""
    # "<" in a script element could end it; in JSON strings it may be written like this.
    data = document.to_json().replace("<", "\\u003c")
    command = document.data.get("command")
    repeat = f"<h4>To repeat it</h4>\n<pre>{escape(command)}</pre>" if command else ""
    title, report = escape(document.headline), render(document)
    return PAGE.format(title=title, report=report, repeat=repeat, data=data)
