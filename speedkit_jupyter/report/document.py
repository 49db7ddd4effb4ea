"""A report that every front end can show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from speedkit_jupyter.report import html, text
from speedkit_jupyter.report.elements import Content, Section


@dataclass(frozen=True)
class Document(Content):
    """What magics show, in the form that a front end asks for."""

    def brief(self) -> Document:
        """Return the same with what is folded left folded."""
        return replace(self, is_brief=True)

    def and_lines(self, lines: Sequence[str]) -> Document:
        """Return the same with more lines below."""
        return (
            replace(self, sections=(*self.sections, Section("\n".join(lines)))) if lines else self
        )

    def to_text(self) -> str:
        """Return it for terminals."""
        return text.render(self)

    def to_html(self) -> str:
        """Return it for notebooks; readable on light and dark themes."""
        return html.render(self)

    def to_page(self) -> str:
        """Return it as a whole HTML page with the plain values in it."""
        return html.page(self)

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.to_text(), "text/html": self.to_html()}
        # Only where asked for: JupyterLab would show JSON in place of the HTML.
        if include and "application/json" in include:
            bundle["application/json"] = json.loads(self.to_json())
        return {
            kind: value
            for kind, value in bundle.items()
            if (not include or kind in include) and (not exclude or kind not in exclude)
        }
