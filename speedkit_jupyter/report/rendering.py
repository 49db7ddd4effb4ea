"""Render reports as text and HTML, and their figures as PNG.

The HTML sets no text color. Its styles are inline, because several front ends drop style sheets.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.report import elements
from speedkit_jupyter.report.verdicts import linked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = "  "
# Cells break at spaces, after a `+`, as in `bf16+channels_last`, and after a comma before a letter.
BREAKS = r"([ \n]+)|(?<=\+)|(?<=,)(?=[a-z])"


@dataclass(frozen=True)
class Document:
    """A report: a headline, `content` (sections or bare bodies), and plain values in `data`.

    If `is_brief`, HTML collapses folded sections; text shows one line for each without a title.
    """

    headline: str
    content: Sequence[Any] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_brief: bool = False

    @property
    def sections(self) -> list[elements.Section]:
        kind = elements.Section
        every = (one if isinstance(one, kind) else kind(one) for one in self.content)
        return [section for section in every if section]

    def brief(self) -> Document:
        return replace(self, is_brief=True)

    def to_text(self) -> str:
        """Return plain text, wrapped to the terminal's width, without pictures."""
        # 100 columns without a terminal, as in a notebook or a pipe.
        width = max(60, shutil.get_terminal_size((100, 24)).columns)
        shown = [one for one in self.sections if not isinstance(one.body, elements.Picture)]
        parts = [_section_text(section, width, self.is_brief) for section in shown]
        return "\n\n".join(["\n".join(textwrap.wrap(self.headline, width)), *parts])

    def to_html(self) -> str:
        """Return HTML for light and dark themes, with links from messages to documentation."""
        parts = "".join(_section_html(section, self.is_brief) for section in self.sections)
        style = "font-weight:600;margin-bottom:6px"
        title = f'<div style="{style}">{linked(_escaped(self.headline))}</div>'
        return f'<div class="speedkit" style="{FRAME}">{title}{parts}</div>'

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}


# --- text ---


class _Wrapper(textwrap.TextWrapper):
    wordsep_simple_re = re.compile(BREAKS)


def _section_text(section: elements.Section, width: int, is_brief: bool) -> str:
    body = section.body
    if is_brief and section.folded and not section.title:
        return f"… {section.summary}: `%speedkit report --notes`, or the result's report()"
    if isinstance(body, elements.Table):
        text = table(body, width)
    elif isinstance(body, elements.Meter):
        text = f"{100 * body.share:.0f} %, {body.text}"
    elif isinstance(body, elements.CodeBlock):
        text = body.text if body.is_file else textwrap.indent(body.text, "    ")
    else:
        text = "\n".join(textwrap.fill(line, width) for line in body.splitlines())
    return f"{section.title}\n{text}" if section.title else text


def table(found: elements.Table, width: int) -> str:
    """Return a table as text; to fit into `width`, wrap cells, then drop optional columns."""
    while (widths := _widths(found, width)) is None:
        found = found.without_last_optional()
    every = (found.columns, *(row.cells for row in found.rows))
    head, *lines = (_row_text(cells, widths, found) for cells in every)
    rule = GAP.join("─" * size for size in widths)
    return "\n".join([head, rule, *lines] if any(found.columns) else lines)


def _widths(found: elements.Table, width: int) -> list[int] | None:
    """Return the columns' widths in characters, or None if an optional column must be dropped."""
    columns = list(zip(found.columns, *(row.cells for row in found.rows), strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    least = list(widths)
    for at, (name, cells) in enumerate(zip(found.columns, columns, strict=True)):
        if name in found.wraps:
            longest = max(len(word or "") for cell in cells for word in re.split(BREAKS, cell))
            least[at] = min(longest, width // 4)  # longer words, such as lines of code, are broken
    least[-1] = min(widths[-1], found.least_last)
    room = width - len(GAP) * (len(widths) - 1)
    widths[-1] = max(least[-1], min(widths[-1], room - sum(widths[:-1])), 1)
    while sum(widths) > room:
        over = [at for at, size in enumerate(widths) if size > least[at]]
        if not over:
            return None if found.optional else widths
        widths[max(over, key=lambda at: widths[at] - least[at])] -= 1
    return widths


def _row_text(cells: Sequence[str], widths: Sequence[int], found: elements.Table) -> str:
    columns = [
        _Wrapper(max(size, 1), break_on_hyphens=False).wrap(cell)
        for cell, size in zip(cells, widths, strict=True)
    ]
    sides = [">" if name in found.numbers else "<" for name in found.columns]
    lines = []
    for texts in zip_longest(*columns, fillvalue=""):
        lines.append(GAP.join(map("{:{}{}}".format, texts, sides, widths)).rstrip())
    return "\n".join(lines)


# --- HTML ---


# Colors that are legible on white and near-black. Words repeat the meaning of each color.
GOOD, BAD, NEUTRAL, PLANNED = "#1f8838", "#da3633", "#737b84", "#1f6feb"
GREY, CHANGED = "#808080", "#388bfd"
# Backgrounds are translucent, so text stays legible: the last two hex digits are the opacity.
TONE_STYLES = {
    "plain": "background:transparent;",
    "good": f"background:{GOOD}29;",
    "bad": f"background:{BAD}29;",
    "quiet": "opacity:.72;",
}
FRAME = "max-width:84em;line-height:1.45;font-size:13px;margin:4px 0"
# All digits get the same width, so that columns don't move when a table is redrawn.
FIGURES = "font-variant-numeric:tabular-nums"
TABLE = f"border-collapse:collapse;margin:2px 0;font-size:13px;color:inherit;{FIGURES}"
CELL = "padding:3px 10px 3px 0;vertical-align:top;border:0;"
HEAD = f"{CELL}border-bottom:1px solid {GREY}73;vertical-align:bottom;"
INLINE = "background:none;color:inherit"
ASKS = "text-decoration:underline dotted;text-underline-offset:3px;cursor:help"
MARKED = f"background:{CHANGED}33;border-radius:3px;padding:0 5px;margin-left:-5px"
METER = "padding:2px 8px;margin:4px 0;border-radius:3px;box-shadow:inset 0 0 0 1px #80808059"
CODE = (
    f"background:{GREY}1f;border-left:3px solid {GREY}80;padding:6px 10px;"
    "margin:4px 0;white-space:pre;overflow-x:auto;color:inherit;font-family:monospace"
)


def _section_html(section: elements.Section, is_brief: bool) -> str:
    title, body = _escaped(section.title), _body_html(section.body)
    if section.folded:
        name = _escaped(section.summary)
        summary = f'<summary style="cursor:pointer;opacity:.8">{name}</summary>'
        opened = "" if is_brief else " open"
        return f'<details{opened} style="margin:4px 0">{summary}{body}</details>'
    return f'<div style="font-weight:600;margin:10px 0 2px">{title}</div>' * bool(title) + body


def _body_html(body: object) -> str:
    if isinstance(body, elements.Table):
        return _table_html(body)
    if isinstance(body, elements.CodeBlock):
        return f'<pre style="{CODE}">{escape(body.text)}</pre>'
    if isinstance(body, elements.Meter):
        look = f"{_bar(body.share, PLANNED)};{METER}"
        return f'<div style="{look}">{100 * body.share:.0f} %, {_escaped(body.text)}</div>'
    if isinstance(body, elements.Picture):
        source = f"data:image/png;base64,{b64encode(body.png()).decode()}"
        alt = escape(body.text)
        return f'<img alt="{alt}" style="max-width:100%;width:48em" src="{source}">'
    lines = "".join(f"<div>{linked(_escaped(line))}</div>" for line in str(body).splitlines())
    return f'<div style="margin:4px 0">{lines}</div>'


def _table_html(found: elements.Table) -> str:
    head = ""
    for name in found.columns:
        title = _escaped(name).replace("-", "&#8209;")
        head += f'<th scope="col" style="{HEAD}text-align:{_side(found, name)};">{title}</th>'
    head = f"<thead><tr>{head}</tr></thead>" * any(found.columns)
    body = f"{head}<tbody>{''.join(_row_html(found, row) for row in found.rows)}</tbody>"
    return f'<div style="overflow-x:auto"><table style="{TABLE}">{body}</table></div>'


def _row_html(found: elements.Table, row: elements.Row) -> str:
    cells = ""
    for name, cell in zip(found.columns, row.cells, strict=True):
        space = "normal" if name in (found.columns[-1], *found.wraps) else "nowrap"
        style = f"{CELL}text-align:{_side(found, name)};white-space:{space};"
        if share := getattr(cell, "share", 0.0):
            style += _bar(share, GOOD if row.tone == "good" else GREY)
        cells += f'<td style="{style}">{_cell_html(cell, name in found.wraps)}</td>'
    return f'<tr style="{TONE_STYLES[row.tone]}">{cells}</tr>'


def _cell_html(cell: str, wraps: bool) -> str:
    look = cell if isinstance(cell, elements.TableCell) else elements.TableCell("")
    if look.code:
        style = f"{INLINE};font-family:monospace;white-space:pre-wrap"
        return f'<code style="{style}">{escape(cell)}</code>'
    if look.hint:
        return f'<span title="{escape(look.hint)}" style="{ASKS}">{_escaped(cell)}</span>'
    if look.changed:
        return f'<strong class="speedkit-changed" style="{MARKED}">{_escaped(cell)}</strong>'
    text = linked(_escaped(cell))
    # Names such as `bf16+channels_last` may break, but intervals may not.
    return text.replace("+", "+<wbr>").replace(" to ", "&nbsp;to&nbsp;") if wraps else text


def _bar(share: float, colour: str) -> str:
    end = f"{100 * share:.0f}%"
    return f"background:linear-gradient(90deg,{colour}66 {end},transparent {end})"


def _side(found: elements.Table, name: str) -> str:
    return "right" if name in found.numbers else "left"


def _escaped(text: str) -> str:
    """Return text escaped for HTML; if backticks are paired, text between them becomes <code>."""
    if text.count("`") % 2:
        return escape(text)
    return re.sub("`([^`]*)`", rf'<code style="{INLINE}">\1</code>', escape(text))


# --- figures ---


def axes_of(height: float, x_label: str) -> Any:
    """Return the axes of a new figure of `height` inches; the user's pyplot state is unchanged."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label, color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    axes.spines[:].set_visible(False)
    return axes


def as_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes, with 144 dots per inch for dense screens."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
