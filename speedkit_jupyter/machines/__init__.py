"""The package's machine profiles, one JSON file each, and the choice of the machine to plan for."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean

# Environment variable with the machine to plan for: a JSON file, or the name of a shipped profile.
VARIABLE = "SPEEDKIT_HARDWARE"


def names() -> list[str]:
    """Return the names of the shipped machine profiles, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def as_for(name: str) -> str:
    """Return a report's note that the plan is for the machine `name`, set by SPEEDKIT_HARDWARE."""
    return f"as for {name}, by {VARIABLE}"


def find(word: str) -> Path:
    """Return the JSON file of a machine by path or by name (`t4.json` and `t4` are the same).

    A user's file takes precedence over a profile. Raises ConfigError if neither exists.
    """
    given, name = Path(os.path.expanduser(word)), word.removesuffix(".json")
    with suppress(OSError):  # not a valid path
        if given.is_file() or (given.exists() and name not in names()):
            return given  # for a folder, reading raises the error
    if name in names():
        return Path(__file__).parent / f"{name}.json"
    hint, every = did_you_mean(given.stem, names()), ", ".join(names())
    raise ConfigError([f"{word}: no such file, and no machine of this name among {every}.{hint}"])
