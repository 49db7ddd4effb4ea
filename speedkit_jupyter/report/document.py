"""A report that every front end can show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speedkit_jupyter.report import html, text
from speedkit_jupyter.report.elements import Section


@dataclass(frozen=True)
class Document:
    """A headline with its content: sections, or bodies without a title. Empty ones are left out.

    `data` is a result's plain values, for a page. A brief document shows summaries of what is
    folded.
    """

    headline: str
    content: Sequence[Any] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_brief: bool = False

    @property
    def sections(self) -> list[Section]:
        """The sections that have something in them."""
        every = (one if isinstance(one, Section) else Section(one) for one in self.content)
        return [section for section in every if section]

    def brief(self) -> Document:
        """Return the same with summaries of what is folded."""
        return replace(self, is_brief=True)

    def and_lines(self, lines: Sequence[str]) -> Document:
        """Return the same with more lines below."""
        return replace(self, content=[*self.content, "\n".join(lines)])

    def to_text(self) -> str:
        """Return it for terminals."""
        return text.render(self.headline, self.sections, self.is_brief)

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
