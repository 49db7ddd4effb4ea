"""A magic's line as words, options and set-up code."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable
from typing import NoReturn

from IPython.core.error import UsageError

from speedkit_jupyter.support.exceptions import did_you_mean

# An option word (`--budget`, `--budget=3`, `-n10`), and a value that follows it, quoted or not.
OPTION = re.compile(r"\s*(--?[A-Za-z][^\s=]*)(=\S*)?")
VALUE = re.compile(r"""\s+("[^"]*"|'[^']*'|\S+)""")
# Text in quotes, or else in brackets.
BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[[^\]]*\]""")
END_OF_OPTIONS = re.compile(r"\s*--(?=\s|$)")
# Text in quotes, or else a comment.
COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<!\S)#.*""")


class Parser(argparse.ArgumentParser):
    """Errors are one line with the nearest right word, never an exit."""

    def __init__(self, command: str) -> None:
        topic = command.strip("%").removeprefix("speedkit ")
        self.help_command = f"%speedkit help {topic}"
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise IPython's UsageError."""
        message = message.replace("invalid seconds value", "no number")
        message = re.sub(r"invalid \w+ value", "no whole number", message)
        message = re.sub(r"argument (\S+): expected one argument", r"\1 needs a value", message)
        message = message.removeprefix("argument ")
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if choice:
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
    """The words of a line, quotes respected; raises UsageError where one is left open."""
    try:
        return shlex.split(BRACKETS.sub(_kept, line))
    except ValueError as error:
        raise UsageError(f"can't be read: {error}") from None


def _kept(match: re.Match[str]) -> str:
    """Quotes and blanks within brackets belong to a word, as in `models['lm']`."""
    return match[0] if match[1] else re.sub(r"(['\"\s\\])", r"\\\1", match[0])


def options(parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...]]:
    """Every long option with the words that it takes."""
    return {
        name: tuple(getattr(action, "words", ()))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def described(parser: Parser) -> list[tuple[str, str]]:
    """Every option and positional word, and what it does with the words that it takes."""
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
    """The options at the beginning of a `%%speedbench` line, and the setup code after them.

    The setup is left as it was typed, quotes and all.
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
