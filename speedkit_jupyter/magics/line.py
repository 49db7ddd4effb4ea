"""A magic's line: its comment, words and options, the set-up code behind them, its subcommand."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from speedkit_jupyter.support.exceptions import did_you_mean

if TYPE_CHECKING:
    from speedkit_jupyter.session import Session

Names = MutableMapping[str, Any]
Source = Callable[[Mapping[str, Any]], list[str]]
Run = Callable[[Names, "Session", argparse.Namespace], None]

# An option word (`--budget`, `--budget=3`, `-n10`), and a value that follows it, quoted or not.
OPTION = re.compile(r"\s*(--?[A-Za-z][^\s=]*)(=\S*)?")
VALUE = re.compile(r"""\s+("[^"]*"|'[^']*'|\S+)""")
# Text in quotes, or else in brackets.
BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[[^\]]*\]""")
END_OF_OPTIONS = re.compile(r"\s*--(?=\s|$)")
# Text in quotes, or else a comment.
COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<!\S)#.*""")


class Parser(argparse.ArgumentParser):
    """Parse a line; an error is one line with the nearest right word, never an exit."""

    def __init__(self, command: str) -> None:
        topic = command.strip("%").removeprefix("speedkit ")
        self.help_command = f"%speedkit help {topic}"
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def option(
        self,
        name: str,
        metavar: str | None,
        about: str,
        found: Source | None = None,
        words: Iterable[str] = (),
        **more: Any,
    ) -> None:
        """Add an option, or a word without one.

        Tab offers what is `found` among the notebook's names, or else the `words`.
        """
        action = self.add_argument(name, metavar=metavar, help=about, **more)
        action.found, action.words = found, tuple(words)  # type: ignore[attr-defined]

    def switch(self, name: str, about: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=about)

    def error(self, message: str) -> NoReturn:
        """Raise IPython's UsageError."""
        message = re.sub(r"invalid (.+?) value", r"no \1", message)
        message = re.sub(r"argument (\S+): expected one argument", r"\1 needs a value", message)
        message = message.removeprefix("argument ")
        if choice := re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message):
            words = choice[2].replace("'", "")
            hint = did_you_mean(choice[1], words.split(", "))
            raise UsageError(f"{self.prog}: {choice[1]!r} is not allowed; allowed: {words}.{hint}")
        match = re.search(r"unrecognized arguments: (\S+)", message)
        if match and match[1] in ("-h", "--help"):
            names = ", ".join(options(self))
            begin = f"its options are {names}; " if names else ""
            message = f"{begin}{self.help_command} says what it takes"
        elif match and match[1].startswith("-"):
            message = f"unknown option {match[1]!r}.{self._hint(match[1])}"
        elif match:
            message = f"{match[1]!r} is one word too many (lists take commas without spaces)"
        raise UsageError(f"{self.prog}: {message}")

    def _hint(self, option: str) -> str:
        """The nearest option, by its letters alone, or where to find all of them."""
        names = {name.strip("-"): name for name in options(self)}
        near = did_you_mean(option.partition("=")[0].strip("-"), names)
        for name in sorted(names, key=len, reverse=True):
            if repr(name) in near:
                return f" Did you mean {names[name]!r}?"
        return f" {self.help_command} lists them"

    def parse_line(self, line: str) -> argparse.Namespace:
        """Parse a magic's line; raises UsageError."""
        return self.parse_args(split(line))


def without_comment(line: str) -> str:
    """Return a magic's line without the comment behind it; a # in quotes or in a word is none."""
    return COMMENT.sub(lambda match: match[1] or "", line).rstrip()


def split(line: str) -> list[str]:
    """Return the words of a line, quotes respected; raises UsageError where one is left open."""

    def kept(match: re.Match[str]) -> str:
        """Quotes and blanks within brackets belong to a word, as in `models['lm']`."""
        return match[0] if match[1] else re.sub(r"(['\"\s\\])", r"\\\1", match[0])

    try:
        return shlex.split(BRACKETS.sub(kept, line))
    except ValueError as error:
        raise UsageError(f"can't be read: {error}") from None


def options(parser: argparse.ArgumentParser) -> list[str]:
    """Return every long option."""
    return [n for action in parser._actions for n in action.option_strings if n[:2] == "--"]


def described(parser: Parser) -> list[tuple[str, str]]:
    """Return every option and word, and what it does with the words that it takes."""
    rows = []
    for action in parser._actions:
        allowed: Iterable[object] = action.choices or getattr(action, "words", None) or ()
        words = [str(word) for word in allowed]
        value = str(action.metavar or ("" if action.nargs == 0 else action.dest.upper()))
        optional = f"[{value}]" if action.nargs == "?" else value
        name = next(iter(action.option_strings), "")
        summary = f"{action.help}: {', '.join(words)}" if words else str(action.help)
        rows.append((f"{name} {optional}".strip(), summary))
    return rows


def split_setup(parser: Parser, line: str) -> tuple[str, str]:
    """Return the options at the beginning of a `%%speedbench` line, and the set-up code after
    them as it was typed.
    """
    takes_value = {
        name: action.nargs != 0 for action in parser._actions for name in action.option_strings
    }
    end = 0
    while match := OPTION.match(line, end):
        end = match.end()
        if takes_value.get(match[1]) and not match[2] and (value := VALUE.match(line, end)):
            end = value.end()
    begin = marker.end() if (marker := END_OF_OPTIONS.match(line, end)) else end
    return line[:end], line[begin:].strip()


def number(kind: type, what: str, low: float, high: float = sys.maxsize) -> Callable[[str], Any]:
    """Return a type for options: a number from `low` to `high`, which the error calls `what`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # argparse says it
    return read


whole_number = number(int, "a number of times: give 1 or more", 1)
seconds = number(float, "a positive number of seconds", sys.float_info.min)


def names_of(text: str) -> list[str]:
    """Return the names of a list with commas."""
    return [name for name in text.split(",") if name]


@dataclass(frozen=True)
class Command:
    """A subcommand of `%speedkit`; its parser, completion and help follow from it.

    `summary` is its line in help, `add_options` gives the parser what it takes, and `run` does it
    with the notebook's names, its session, and the arguments. It displays and returns nothing.
    """

    name: str
    summary: str
    run: Run
    add_options: Callable[[Parser], None] = lambda parser: None

    @cached_property
    def parser(self) -> Parser:
        """The parser, made at first use: the options of the catalog take a while."""
        parser = Parser(f"%speedkit {self.name}")
        self.add_options(parser)
        return parser

    @property
    def takes_arguments(self) -> bool:
        """Whether there is anything that it could be given."""
        return bool(self.parser._actions)

    def parse(self, line: str) -> argparse.Namespace:
        """Return its arguments; raises UsageError."""
        if line.strip() and not self.takes_arguments:
            raise UsageError(f"%speedkit {self.name} takes no arguments, not {line.strip()!r}")
        return self.parser.parse_line(line)
