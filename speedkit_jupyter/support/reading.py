"""Read what others have written, within limits of size, and say in a line what is wrong with it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from speedkit_jupyter.support.exceptions import printable

# Configs and machines have a few hundred bytes.
MOST_BYTES = 2**16
# JSON of more values is refused before it is parsed: pydantic takes 0.5 KiB for each mistake, and
# ends the process where there is no memory for them.
MOST_VALUES = 2**19


def text(path: str | os.PathLike[str]) -> str:
    """Return the text of a small file. Raises OSError or ValueError."""
    if not stat.S_ISREG(Path(path).stat().st_mode):  # a pipe or a device may never end
        raise ValueError("this is no file")
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return content.decode()


def record(content: Any, form: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return what JSON holds, which must have this form. Raises ValueError or RecursionError."""
    text = content.decode() if isinstance(content, bytes) else content
    if not isinstance(text, str):
        raise ValueError("it is no text, or too long")
    if text.count(",") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    if form is not None:
        form.model_validate(found)
    return found


def why(error: BaseException) -> str:
    """Return what is wrong with something that was read, in few words and one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    elif isinstance(error, RecursionError | MemoryError):
        said = "it is nested too deep, or too large"
    else:
        said = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return printable(" ".join(said.split()))[:160]
