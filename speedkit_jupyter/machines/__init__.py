"""The machines that ship, one JSON file each, and the one that the user plans for."""

from __future__ import annotations

from pathlib import Path

from speedkit_jupyter.support.exceptions import ConfigError, did_you_mean

# A file, or the name of one that ships: plans are made as for that machine.
VARIABLE = "SPEEDKIT_HARDWARE"


def names() -> list[str]:
    """Return what ships, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def as_for(name: str) -> str:
    """Return how reports say that a plan is made for a machine that the user named."""
    return f"as for {name}, by {VARIABLE}"


def find(word: str) -> Path:
    """Return the file that a path or a name stands for (`t4.json` and `t4` are the same name).

    A file of the user's wins over one that ships. Raises ConfigError with the nearest name.
    """
    name = word.removesuffix(".json")
    try:
        given = Path(word).expanduser()
        if given.exists() and (given.is_file() or name not in names()):
            return given  # a folder says itself that it can't be read
    except (OSError, ValueError, RuntimeError) as error:  # no possible path, or no such home
        raise ConfigError([f"{word}: {error}"]) from None
    if name in names():
        return Path(__file__).parent / f"{name}.json"
    siblings = [str(given.with_name(sibling.name)) for sibling in given.parent.glob("*.json")]
    hint = did_you_mean(word, siblings) or did_you_mean(given.stem, names())
    raise ConfigError(
        [f"{word}: there is no such file, and no such machine among {', '.join(names())}.{hint}"]
    )
