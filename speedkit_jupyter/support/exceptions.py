"""The errors that SpeedKit raises on purpose, and the hint `Did you mean …?`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpeedKitError(Exception):
    """Base class of SpeedKit's errors; the message names the mistake and, if possible, a remedy."""


class ConfigError(SpeedKitError, ValueError):
    """A configuration is invalid. `problems` is a tuple with one line for each mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(printable, problems))
        super().__init__("\n".join(self.problems))


class StepError(SpeedKitError):
    """A step can't be measured as written, or an option of a measurement is invalid."""


class ArgumentError(SpeedKitError, TypeError):
    """An argument has the wrong type or an invalid value."""


def in_a_line(error: BaseException) -> str:
    """Return an error's first line; the class name precedes it unless the error is SpeedKit's."""
    first = (str(error).strip().splitlines() or [""])[0]
    is_ours = isinstance(error, SpeedKitError)
    return first if is_ours else f"{type(error).__name__}: {first:.200}".rstrip(": ")


def printable(text: str) -> str:
    """Return a text in one line, with unprintable characters escaped: `\\x1b`."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


# Terms of other tools, with SpeedKit's terms for them.
SYNONYMS = {"gpu": "cuda", "16": "fp16", "half": "fp16", "32": "fp32", "float": "fp32"}


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return ` Did you mean 'bf16'?` for the most similar known word; empty if none is similar."""
    lowered = {str(name).lower(): str(name) for name in known}
    asked = SYNONYMS.get(str(word).lower(), str(word).lower())
    near = difflib.get_close_matches(asked, lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[near[0]]!r}?" if near else ""
