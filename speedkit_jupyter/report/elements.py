"""Describe the elements of reports as data: tables, meters, code and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from speedkit_jupyter.support.units import count

Tone = Literal["plain", "good", "bad", "quiet"]
BLANK = "–"
AS_BEFORE = "Model, optimizer and random state are as before."


class TableCell(str):
    """A table cell with a format for HTML. In text output, only a `changed` cell gets a mark, ●.

    `code` makes a cell monospaced, `hint` is a tooltip, and `share` (0 to 1) is the length of a bar
    behind the text. Of `code`, `hint` and `changed`, HTML uses only the first that is set.
    """

    changed = code = False
    hint, share = "", 0.0

    def __new__(cls, text: str, **look: Any) -> TableCell:
        cell = super().__new__(cls, f"● {text}" if look.get("changed") else text)
        vars(cell).update(look)
        return cell


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Table:
    """A table of columns and rows; a plain tuple is a row without a color.

    Columns in `numbers` are right-aligned; columns in `wraps`, and the last column, may wrap. Text
    output drops `optional` columns, beginning with the last, until the table fits on the page. The
    last column keeps `least_last` characters, if its cells are that long.
    """

    columns: tuple[str, ...]
    rows: Sequence[Any]  # Row objects or tuples
    numbers: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    least_last: int = 20

    def __post_init__(self) -> None:
        rows = [row if isinstance(row, Row) else Row(row) for row in self.rows]
        object.__setattr__(self, "rows", rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def without_last_optional(self) -> Table:
        at = self.columns.index(self.optional[-1])
        rows = [Row(row.cells[:at] + row.cells[at + 1 :], row.tone) for row in self.rows]
        columns = self.columns[:at] + self.columns[at + 1 :]
        return replace(self, columns=columns, rows=rows, optional=self.optional[:-1])


@dataclass(frozen=True)
class Meter:
    """A progress meter: the finished share of the work (0 to 1), with a text."""

    share: float
    text: str


@dataclass(frozen=True)
class CodeBlock:
    """Code to paste into a cell or, if `is_file`, the text of a whole file."""

    text: str
    is_file: bool = False

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True)
class Picture:
    """A picture: `png()` returns its PNG bytes, and `text` is its alternative text."""

    png: Callable[[], bytes]
    text: str


@dataclass(frozen=True)
class Section:
    """A section of a report; if `folded`, a brief report may show only the `summary`."""

    body: Any  # Table | CodeBlock | Meter | Picture | str, or empty
    title: str = ""
    folded: bool = False
    noun: str = "note"

    def __bool__(self) -> bool:
        return bool(self.body)

    @property
    def summary(self) -> str:
        rows = self.body.rows if isinstance(self.body, Table) else str(self.body).splitlines()
        return self.title or count(len(rows), f"more {self.noun}")


def banner(line: str) -> str:
    """Return a line as a sentence before a headline, such as `The machine was busy. `."""
    return line and f"{line[:1].upper()}{line[1:]}. "
