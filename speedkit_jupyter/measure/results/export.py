"""The files that a result is saved as: a function for each ending."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError


def _csv(result: Any) -> str:
    """The table alone."""
    rows, text = result.rows(), io.StringIO()
    table = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


# JSON and a page hold raw samples, environment and the command to repeat it besides the table.
FORMATS: dict[str, Callable[[Any], str]] = {
    ".csv": _csv,
    ".json": lambda result: result.to_json(),
    ".html": lambda result: result.report().to_page(),
    ".htm": lambda result: result.report().to_page(),
}


def save(result: Any, path: str | Path) -> Path:
    """Write it as the ending says; raises SpeedKitError for another one, or where nothing can be
    written.
    """
    file = Path(path).expanduser()
    if file.suffix not in FORMATS:
        raise SpeedKitError(f"{path}: give a name that ends in {' or '.join(sorted(FORMATS))}")
    try:
        file.write_text(FORMATS[file.suffix](result), encoding="utf-8")
    except OSError as error:
        raise SpeedKitError(f"{path}: {error.strerror}") from None
    return file
