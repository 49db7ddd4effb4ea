"""A report that every front end can show: as text or as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speedkit_jupyter.report import rendering
from speedkit_jupyter.report.elements import Section


@dataclass(frozen=True)
class Document:
    """A headline with sections, or with bodies without a title; empty ones are left out.

    `data` has the result as plain values. A brief document shows summaries of folded sections.
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

    def to_text(self) -> str:
        """Return plain text, wrapped to the terminal's width, without pictures."""
        return rendering.as_text(self.headline, self.sections, self.is_brief)

    def to_html(self) -> str:
        """Return HTML for notebooks, for light and dark themes, with links to pages on messages."""
        return rendering.as_html(self.headline, self.sections, self.is_brief)

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}
