"""What reports are made of: tables, lines, code and pictures, and a page of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Tone = Literal["plain", "good", "bad", "quiet"]


class Changed(str):
    """A cell that differs from the one before it: marked with ●, and in HTML with weight too."""

    __slots__ = ()

    def __new__(cls, text: str) -> Changed:
        return super().__new__(cls, f"● {text}")


class Source(str):
    """A cell that is code: in HTML in a font of one width."""

    __slots__ = ()


class Hinted(str):
    """A cell with a `hint` for those who have never heard of it: in HTML a tooltip."""

    hint: str

    def __new__(cls, text: str, hint: str) -> Hinted:
        cell = super().__new__(cls, text)
        cell.hint = hint
        return cell


@dataclass(frozen=True)
class Row:
    """Cells of one line of a table. `tone` colours it; a word in the cells always says it too."""

    cells: tuple[str, ...]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Table:
    """Columns with their rows.

    Columns named in `numbers` are aligned to the right, those in `wraps` break into lines where
    the page is narrow, as the last one always does. Those in `optional` leave a text that is too
    narrow for all, the last of them first. There the last column, which explains, gets at least
    `least_last` characters, where it has so many.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    numbers: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    least_last: int = 20


@dataclass(frozen=True)
class Code:
    """Lines to paste into a cell; those in a `language` are a whole file, coloured in HTML."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG, drawn where pictures can be shown; `text` says the same in words."""

    png: Callable[[], bytes]
    text: str


@dataclass(frozen=True)
class Folded:
    """Lines or a table for those who want them: a brief report has only the `summary`."""

    body: Table | str
    title: str = ""

    @property
    def summary(self) -> str:
        """What stands in their place."""
        if self.title or isinstance(self.body, Table):
            return self.title
        number = len(self.body.splitlines())
        return f"{number} more note{'s' if number > 1 else ''}"


@dataclass(frozen=True)
class Section:
    """A part of a report under an optional title."""

    body: Table | Code | Picture | Folded | str
    title: str = ""


@dataclass(frozen=True)
class Content:
    """A headline with its sections; `data` is the same as plain values, for JSON. A brief one
    leaves folded what is folded.
    """

    headline: str
    sections: tuple[Section, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_brief: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(self.data)

    def to_json(self) -> str:
        """Return the plain values as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)
