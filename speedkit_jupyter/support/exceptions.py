"""The errors that SpeedKit raises on purpose.

SpeedKitError
 ├─ ConfigError   a configuration that can't be read; it lists every mistake at once
 ├─ StepError     a step that can't be measured; it names what to change
 └─ ArgumentError what a function was given is of the wrong kind
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpeedKitError(Exception):
    """Base of every error that SpeedKit raises on purpose; its text is written for users."""


class ConfigError(SpeedKitError, ValueError):
    """A configuration that can't be read. `problems` holds one line for each mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(printable, problems))
        super().__init__("\n".join(self.problems))


class StepError(SpeedKitError):
    """A step that can't be measured as it is written."""


class ArgumentError(SpeedKitError, TypeError):
    """What a function was given is of the wrong kind."""


def in_a_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says; of ours, that line alone."""
    first = (str(error).strip().splitlines() or [""])[0]
    is_ours = isinstance(error, SpeedKitError)
    return first if is_ours else f"{type(error).__name__}: {first:.200}".rstrip(": ")


def printable(text: str) -> str:
    """Return text in one line, and without what a terminal would act on: `\\x1b` as it is spelt."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


# Words of other tools for what has another name here.
SYNONYMS = {"gpu": "cuda", "16": "fp16", "half": "fp16", "32": "fp32", "float": "fp32"}


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return ` Did you mean 'bf16'?` for the nearest known word; empty where none is near."""
    lowered = {str(name).lower(): str(name) for name in known}
    asked = SYNONYMS.get(str(word).lower(), str(word).lower())
    near = difflib.get_close_matches(asked, lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[near[0]]!r}?" if near else ""
