"""The machines that ship, one JSON file each, and the one that the user plans for."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean

# Environment variable with a file, or the name of a machine that ships, to plan for.
VARIABLE = "SPEEDKIT_HARDWARE"


def names() -> list[str]:
    """Return the names of the machines that ship, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def as_for(name: str) -> str:
    """Return the words of reports for a plan for a machine that the user named."""
    return f"as for {name}, by {VARIABLE}"


def find(word: str) -> Path:
    """Return the file of a machine, by its path or its name (`t4.json` and `t4` are the same).

    A user's file takes precedence. Raises ConfigError with the nearest name.
    """
    given, name = Path(os.path.expanduser(word)), word.removesuffix(".json")
    with suppress(OSError):  # no possible path
        if given.is_file() or (given.exists() and name not in names()):
            return given  # reading a folder raises the error
    if name in names():
        return Path(__file__).parent / f"{name}.json"
    hint, every = did_you_mean(given.stem, names()), ", ".join(names())
    raise ConfigError([f"{word}: there is no such file, and no such machine among {every}.{hint}"])
