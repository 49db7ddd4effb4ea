"""Define and parse the options of the magics."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.notebook import namespace
from speedkit_jupyter.step.variants import AUTO, BASELINE, CURRENT, words
from speedkit_jupyter.support.exceptions import did_you_mean

if TYPE_CHECKING:
    from speedkit_jupyter.notebook.session import Session

Names = MutableMapping[str, Any]
Run = Callable[[Names, "Session", argparse.Namespace], None]

# Seconds by unit, for options that take a time.
TIME_UNITS_S = {"min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}
# Matches quoted text, or text in square brackets.
BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[[^\]]*\]""")
# Matches quoted text, or a comment.
COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<!\S)#.*""")


class Option:
    """An option or argument. Tab offers `found(names)`, else `words`; argparse gets `more`."""

    def __init__(
        self,
        name: str,
        metavar: str | None,
        about: str,
        found: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
        words: Iterable[str] = (),
        **more: Any,
    ) -> None:
        self.names = list(dict.fromkeys((name, name.replace("_", "-"))))
        self.found, self.words = found, tuple(words or more.get("choices", ()))
        self.more = {"help": about, **({"metavar": metavar} if metavar else {}), **more}


def switch(name: str, about: str) -> Option:
    return Option(name, None, about, action="store_true")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, often with a suggestion, instead of exiting."""

    def __init__(self, command: str, options: Iterable[Option]) -> None:
        self.about: dict[str, Option] = {}
        super().__init__(prog=command, add_help=False, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # `-5ms` is a value, too
        self.extend(options)

    def extend(self, options: Iterable[Option]) -> None:
        """Add options that the parser does not have yet."""
        for option in options:
            if option.names[0] not in self._option_string_actions:
                action = self.add_argument(*option.names, **option.more)
                self.about[action.dest] = option

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"invalid (.+?) value", r"not a \1", message)
        message = re.sub(r"argument (\S+): expected one argument", r"\1 needs a value", message)
        message = message.removeprefix("argument ")
        topic = self.prog.strip("%").removeprefix("speedkit ")
        if choice := re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message):
            typed, words = choice[1], choice[2].replace("'", "")
            hint = did_you_mean(typed, words.split(", "))
            message = f"{typed!r} is not allowed; allowed: {words}.{hint}"
        elif match := re.search(r"unrecognized arguments: (\S+)", message):
            known = [name[2:] for name in self._option_string_actions if name[:2] == "--"]
            hint = did_you_mean(match[1].partition("=")[0].strip("-"), known)
            hint = hint.replace(" '", " '--") or f" %speedkit help {topic} lists them"
            message = f"unknown option {match[1]!r}.{hint}"
            if match[1][0] != "-":
                unit = match[1] in TIME_UNITS_S and f"a time has no space: 20{match[1]}"
                hint = unit or "write lists with commas, without spaces"
                message = f"{match[1]!r} is unexpected ({hint})"
        raise UsageError(f"{self.prog}: {message}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Return the parsed arguments of a magic's line; raises UsageError."""
        words = split(line)
        for word in words:  # argparse would take the value of an unknown option for an argument
            name = word.partition("=")[0]
            if name[:2] == "--" != name and name not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")
        return self.parse_args(words)

    def described(self) -> list[tuple[str, str]]:
        """Return a row for each option: its usage, and its purpose with the allowed words."""
        rows = []
        for action in self._actions:
            words = ", ".join(self.about[action.dest].words)
            value = str(action.metavar or ("" if action.nargs == 0 else action.dest.upper()))
            value = f"[{value}]" if action.nargs == "?" else value
            name = next(iter(action.option_strings), "")
            rows.append((f"{name} {value}".strip(), f"{action.help}{f': {words}' * bool(words)}"))
        return rows


def without_comment(line: str) -> str:
    """Return a magic's line without its trailing comment; a # in quotes or in a word stays."""
    return COMMENT.sub(lambda match: match[1] or "", line).rstrip()


def split(line: str) -> list[str]:
    """Return a line's words; `models['l m']` is one word. Raises UsageError for open quotes."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[1] else re.sub(r"(['\"\s\\])", r"\\\1", match[0])

    try:
        return shlex.split(BRACKETS.sub(kept, line))
    except ValueError as error:
        raise UsageError(f"can't read the line: {error}") from None


def number(kind: type, what: str, low: float, high: float = sys.maxsize) -> Callable[[str], Any]:
    """Return a function that reads a number from `low` to `high`; `what` begins the error text."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{what}, not {text}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # the name in argparse's errors
    return read


whole_number = number(int, "must be 1 or more", 1)


def time_of(text: str) -> float:
    """Return the seconds of a time such as `20ms` or `2min`; a plain number is in seconds."""
    found = re.fullmatch(rf"(\d*\.?\d+) ?({'|'.join(TIME_UNITS_S)}|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a time, such as 20ms")
    value: float = positive_seconds(found[1])
    return value * TIME_UNITS_S[found[2] or "s"]


positive_seconds = number(float, "must be a positive number of seconds", sys.float_info.min)


def comma_list(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


class Command(Parser):
    """A subcommand of `%speedkit`; `run(names, session, arguments)` shows the result."""

    def __init__(self, name: str, summary: str, options: Iterable[Option], run: Run) -> None:
        super().__init__(f"%speedkit {name}", options)
        self.name, self.summary, self.run = name, summary, run


def command(summary: str, *options: Option) -> Callable[[Run], Command]:
    """Return a decorator that makes a function the subcommand of the same name."""
    return lambda run: Command(run.__name__, summary, options, run)


# --- options that several commands share ---


def action(*words: str) -> Option:
    """Return the option for a command's action; the first word is the default."""
    first, metavar = words[0], "ACTION"
    return Option("action", metavar, f"({first})", nargs="?", choices=words, default=first)


def listed(name: str, about: str, found: Any = None) -> Option:
    """Return an option that takes comma-separated lists, and may be repeated."""
    return Option(name, "NAMES", about, found, type=comma_list, action="extend")


def budget(about: str) -> Option:
    return Option("--budget", "SECONDS", about, type=positive_seconds)


def step(about: str) -> Option:
    return Option("--step", "NAME", about, namespace.functions)


def plans(names: Mapping[str, Any]) -> list[str]:
    """Return words for `--plan` and `--compare`, which also accept `a+b` and YAML files."""
    return [BASELINE, CURRENT, AUTO, *words()]


def catalog(names: Mapping[str, Any]) -> list[str]:
    return [optimization.name for optimization in CATALOG]


_models = "`net`, `models['lm']`; all models of `pipe`"
MODEL = Option("model", "MODEL", _models, namespace.words_of_models, nargs="?")
OPTIMIZER = listed("--optimizer", "default: all optimizers of the model", namespace.optimizers)
LOADER = Option("--loader", "NAME", "its DataLoader, if SpeedKit can't find it", namespace.loaders)
RESULT = Option("-v", "NAME", "the variable for the result")
ACCURACY = Option("--accuracy", "FUNCTION", "a measure of each variant", namespace.functions)
