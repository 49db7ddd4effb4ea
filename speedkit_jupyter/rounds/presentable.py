"""The base class of results with a report, in every front end and as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import hide_internal_frames


class Shown:
    """A result with a report, which the function `REPORT` makes: "module:function"."""

    REPORT: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @hide_internal_frames
    def report(self) -> Any:
        """Return the report that a notebook shows, with its folded details."""
        module, _, function = self.REPORT.partition(":")
        return getattr(import_module(module), function)(self)

    @hide_internal_frames
    def save(self, path: str | Path) -> Path:
        """Write the result to `path`, in the format of the suffix: .html or .json.

        Raises SpeedKitError for another suffix, or if the file can't be written.
        """
        file = Path(path).expanduser()
        if file.suffix not in FORMATS:
            raise SpeedKitError(f"{path}: give a name that ends in {' or '.join(sorted(FORMATS))}")
        try:
            file.write_text(FORMATS[file.suffix](self), encoding="utf-8")
        except OSError as error:
            raise SpeedKitError(f"{path}: {error.strerror}") from None
        return file

    @hide_internal_frames
    def __repr__(self) -> str:
        return str(self.report().brief().to_text())

    @hide_internal_frames
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = self.report().brief()._repr_mimebundle_(include, exclude)
        return bundle


# Both formats have raw samples, environment and the command that repeats the measurement.
FORMATS: dict[str, Callable[[Any], str]] = {
    ".json": lambda result: result.to_json(),
    ".html": lambda result: f'<meta charset="utf-8">{result.report().to_html()}\n',
}
