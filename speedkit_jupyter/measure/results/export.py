"""The files that a result is saved as: a function for each ending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError

# All hold raw samples, environment and the command to repeat it. A page needs nothing else.
FORMATS: dict[str, Callable[[Any], str]] = {
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
