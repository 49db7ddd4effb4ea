"""Tab completion, made of the parsers: subcommands, options, their words, and what they name."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from typing import Any


def complete(shell: Any, event: Any) -> list[str]:
    """What may stand at the cursor of a `%speedkit` or `%%speedbench` line."""
    from speedkit_jupyter.magics import speedbench_options
    from speedkit_jupyter.magics.commands import COMMANDS

    before = event.line[: len(event.line) - len(event.symbol)] if event.symbol else event.line
    magic, *words = before.split() or [""]
    if magic.lstrip("%") == speedbench_options.NAME:
        return _offered(speedbench_options.parser(), words, shell.user_ns)
    if not words:
        return list(COMMANDS)
    command, *words = words
    return _offered(COMMANDS[command].parser, words, shell.user_ns) if command in COMMANDS else []


def _offered(parser: ArgumentParser, words: list[str], names: Any) -> list[str]:
    """For the option that was typed last, or else for the next word and for further options."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    last = words[-1] if words else ""
    if last[-1:] in (",", "+") and len(words) > 1:  # a list goes on
        last = words[-2]
    if last in options and options[last].nargs != 0:
        return _of(options[last], names)
    further = [name for name in options if name.startswith("--") and name not in words]
    return [*_of_next(parser, options, words, names), *further]


def _of_next(
    parser: ArgumentParser, options: dict[str, Action], words: list[str], names: Any
) -> list[str]:
    """The first of the words without an option that is not typed yet."""
    typed = 0
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before in options and options[before].nargs != 0
        typed += not (word in options or is_value)
    places = [action for action in parser._actions if not action.option_strings]
    return _of(places[typed], names) if typed < len(places) else []


def _of(action: Action, names: Any) -> list[str]:
    """Its words, or what it can name in this notebook."""
    source = getattr(action, "found", None)
    if source is not None:
        return list(source(names))
    return list(getattr(action, "words", None) or action.choices or ())
