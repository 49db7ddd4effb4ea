"""Arguments of the magics; the options come from the catalog."""

from __future__ import annotations

import argparse
import re
import shlex
from functools import lru_cache
from typing import Any, NoReturn

from IPython.core.error import UsageError

from speedkit_jupyter.config import choices, from_word, paths_of
from speedkit_jupyter.exceptions import did_you_mean
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.report.code import FORMS

SUBCOMMANDS = {
    "status": "hardware, what is on, what is left on the table",
    "report": "each decision with its reason, and the flags before and after",
    "apply": "plan for a model and apply the plan",
    "restore": "put everything back",
    "verify": "train with and without a plan, and compare the loss curves",
    "tuned": "the plans that tuning has learned; tuned forget NUMBER drops one",
    "code": "the plan as code without SpeedKit: --as torch, yaml, accelerate, fabric, transformers",
    "panel": "see, toggle and measure a model's plan with buttons",
    "history": "saved benchmarks, and how the newest compares with those before it",
    "config": "show, load or save the session's config",
    "repair": "make torch's two TF32 APIs agree again after they were mixed",
    "help": "this page",
}

PLAIN_OPTIONS = {
    "optimizer": "the optimizer's name; without it those that hold the model's parameters",
    "ctx": "the name that the context gets (ctx)",
    "config": "a YAML file to start from",
    "rules": "by rules, although tuning has learned a plan",
}


# An option word (`--budget`, `--budget=3`, `-n10`), and a value that follows it, quoted or not.
OPTION = re.compile(r"\s*(--?[A-Za-z][^\s=]*)(=\S*)?")
VALUE = re.compile(r"""\s+("[^"]*"|'[^']*'|\S+)""")
END_OF_OPTIONS = re.compile(r"\s*--(?=\s|$)")


class Parser(argparse.ArgumentParser):
    """Errors are one line with the nearest right word, never an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise IPython's UsageError."""
        message = message.replace("invalid _whole_number value", "no whole number")
        message = message.replace("invalid int value", "no whole number")
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if choice:
            words = choice[2].replace("'", "")
            hint = did_you_mean(choice[1], words.split(", "))
            raise UsageError(f"{self.prog}: {choice[1]!r} is not allowed; allowed: {words}.{hint}")
        found = re.search(r"unrecognized arguments: (\S+)", message)
        if found and found[1] in ("-h", "--help"):
            message = f"its options are {', '.join(options(self))}; see %speedkit help"
        elif found and found[1].startswith("-"):
            message = f"unknown option {found[1]!r}.{did_you_mean(found[1], options(self))}"
        elif found:
            message = f"{found[1]!r} is one word too many (lists take commas without spaces)"
        raise UsageError(f"{self.prog}: {message}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Parse a magic's line; raises UsageError."""
        return self.parse_args(split(line))


def split(line: str) -> list[str]:
    """The words of a line, quotes respected; raises UsageError where one is left open."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"can't be read: {error}") from None


def options(parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...]]:
    """Every long option with the words that it takes."""
    return {
        name: tuple(getattr(action, "words", ()))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


@lru_cache(maxsize=1)
def apply_parser() -> Parser:
    """`%speedkit apply`; each config field is an option, each further field `--field-part`."""
    parser = Parser(prog="%speedkit apply", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="the model's name in this notebook")
    parser.add_argument("--optimizer", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--ctx", default="ctx", metavar="NAME")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--rules", action="store_true")
    for option, destination, annotation, summary in config_options():
        words = choices(annotation)
        bare = {"nargs": "?", "const": "true"} if "true" in words else {}
        action = parser.add_argument(
            *{option, option.replace("_", "-")},
            dest=destination,
            default=None,
            help=summary,
            metavar="|".join(words) or "VALUE",
            **bare,  # type: ignore[arg-type]
        )
        action.words = words  # type: ignore[attr-defined]
    return parser


def config_options() -> list[tuple[str, str, Any, str]]:
    """Option, path of the config key, annotation and summary, for every field in the catalog."""
    found = []
    for one in CATALOG:
        for number, (path, annotation) in enumerate(paths_of(one).items()):
            option = f"--{path.replace('.', '-')}" if number else f"--{one.name}"
            found.append((option, path, annotation, one.summary))
    return found


def config_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config values among parsed arguments, nested as in YAML."""
    values: dict[str, Any] = {}
    for _, path, annotation, _ in config_options():
        text = getattr(arguments, path)
        if text is None:
            continue
        name, _, field = path.partition(".")
        value = from_word(text, choices(annotation))
        if field:
            values.setdefault(name, {})[field] = value
        else:
            values[name] = value
    return values


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def report_parser() -> Parser:
    """`%speedkit report`."""
    parser = Parser(prog="%speedkit report", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="the model's name in this notebook")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def code_parser() -> Parser:
    """`%speedkit code`."""
    parser = Parser(prog="%speedkit code", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="the model's name in this notebook")
    action = parser.add_argument("--as", dest="form", default="torch", metavar="FORM")
    action.words = FORMS  # type: ignore[attr-defined]
    parser.add_argument("--optimizer", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--force", action="store_true", help="write over an existing FILE")
    return parser


def panel_parser() -> Parser:
    """`%speedkit panel`."""
    parser = Parser(prog="%speedkit panel", add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="the model's name in this notebook")
    parser.add_argument("--optimizer", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--step", metavar="NAME", help="the function to measure")
    return parser


def config_parser() -> Parser:
    """`%speedkit config`."""
    parser = Parser(prog="%speedkit config", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "action", nargs="?", choices=("show", "load", "save", "reset"), default="show"
    )
    parser.add_argument("file", nargs="?", metavar="FILE")
    return parser


def history_parser() -> Parser:
    """`%speedkit history`."""
    parser = Parser(prog="%speedkit history", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?", help="a name given to %%speedbench --save")
    parser.add_argument("--forget", action="store_true", help="delete what has this name")
    return parser


def verify_parser() -> Parser:
    """`%speedkit verify`."""
    parser = Parser(prog="%speedkit verify", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=_whole_number, default=50, metavar="NUMBER")
    parser.add_argument("--step", metavar="NAME")
    parser.add_argument("--plan", metavar="NAME")
    parser.add_argument("-v", metavar="NAME")
    return parser


def tuned_parser() -> Parser:
    """`%speedkit tuned`."""
    parser = Parser(prog="%speedkit tuned", add_help=False, allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=("list", "forget"), default="list")
    parser.add_argument("which", nargs="?", metavar="NUMBER")
    return parser


@lru_cache(maxsize=1)
def speedbench_parser() -> Parser:
    """`%%speedbench`: options of `%%timeit`, and those of a comparison."""
    parser = Parser(prog="%%speedbench", add_help=False, allow_abbrev=False)
    parser.add_argument("--compare", metavar="NAMES")
    parser.add_argument("--budget", type=float, metavar="SECONDS")
    parser.add_argument("--model", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--optimizer", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--check", type=_names, action="extend", metavar="NAMES")
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--objective", choices=("time", "memory"))
    parser.add_argument("--steps", type=_whole_number, metavar="NUMBER")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("-n", type=int, metavar="LOOPS")
    for option, metavar in (("-r", "RUNS"), ("-p", "DIGITS")):
        parser.add_argument(option, type=_whole_number, metavar=metavar)
    parser.add_argument("-v", metavar="NAME")
    for option in ("-q", "-o", "-t", "-c"):
        parser.add_argument(option, action="store_true")
    return parser


def split_setup(line: str) -> tuple[str, str]:
    """The options at the beginning of a `%%speedbench` line, and the setup code after them.

    The setup is left as it was typed, quotes and all.
    """
    takes_value = {
        name: action.nargs != 0
        for action in speedbench_parser()._actions
        for name in action.option_strings
    }
    end = 0
    while match := OPTION.match(line, end):
        end = match.end()
        if takes_value.get(match[1]) and not match[2] and (value := VALUE.match(line, end)):
            end = value.end()
    begin = marker.end() if (marker := END_OF_OPTIONS.match(line, end)) else end
    return line[:end], line[begin:].strip()


def _whole_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of times: give 1 or more")
    return number
