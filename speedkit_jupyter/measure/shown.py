"""Results that show and save themselves, in every front end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure import export

if TYPE_CHECKING:
    from speedkit_jupyter.report.document import Document


class Shown:
    """A result with a report. The one place below `report/` that asks it for something."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The plain values as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def report(self) -> Document:
        """What a notebook shows of it, and what it leaves folded there."""
        from speedkit_jupyter.report.results import report_of

        return report_of(self)

    def save(self, path: str | Path) -> Path:
        """Write `path`: a page that needs nothing else (.html) or the plain values (.json).

        Both hold raw samples, environment and the command to repeat it. Raises SpeedKitError for
        another ending, or where nothing can be written.
        """
        return export.save(self, path)

    def __repr__(self) -> str:
        return self.report().brief().to_text()

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, Any]:
        return self.report().brief()._repr_mimebundle_(include, exclude)
