"""Tab completion, made of the parsers: subcommands, options, their words, and what they name."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Mapping
from typing import Any

NAMES = ("%speedkit", "%%speedbench")
Names = Mapping[str, Any]


def add_completion(shell: Any) -> None:
    """Have Tab offer our words on our lines, and nothing else there.

    An IPython before 8.6 has no matchers of others, and mixes Python's own names in.
    """
    from IPython.core import completer

    is_new = hasattr(completer, "SimpleCompletion")  # 7.34 has matchers of another form
    matchers = shell.Completer.custom_matchers if is_new else None
    if matchers is not None:
        matchers.append(_Matcher(shell))
    for name in () if matchers is not None else NAMES:
        shell.set_hook("complete_command", _completed, str_key=name)


def remove_completion(shell: Any) -> None:
    """Take it away again."""
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [matcher for matcher in matchers if not isinstance(matcher, _Matcher)]
    for name in NAMES:
        shell.strdispatchers["complete_command"].strs.pop(name, None)


class _Matcher:
    """What IPython asks before its own matchers, which it drops where this one finds anything."""

    matcher_identifier, matcher_api_version, matcher_priority = "speedkit", 2, 1000

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.__qualname__ = type(self).__qualname__  # IPython asks a function for it

    def __call__(self, context: Any) -> dict[str, Any]:
        from IPython.core.completer import SimpleCompletion

        line, token = context.text_until_cursor, context.token
        is_ours = line.lstrip().startswith(NAMES)
        words = complete(line[: len(line) - len(token)], self._shell.user_ns) if is_ours else []
        found = [SimpleCompletion(word) for word in words if word.startswith(token)]
        return {"completions": found, "suppress": bool(found), "ordered": True}


def _completed(shell: Any, event: Any) -> list[str]:
    """The same for the hook of an older IPython."""
    before = event.line[: len(event.line) - len(event.symbol)] if event.symbol else event.line
    return complete(before, shell.user_ns)


def complete(before: str, names: Names) -> list[str]:
    """Return what may stand behind the beginning of a `%speedkit` or `%%speedbench` line."""
    from speedkit_jupyter.magics.commands import COMMANDS
    from speedkit_jupyter.magics.options import speedbench_parser

    magic, *words = before.split() or [""]
    if magic == "%%speedbench":
        return _offered(speedbench_parser(), words, names)
    if not words:
        return list(COMMANDS)
    command, *words = words
    return _offered(COMMANDS[command].parser, words, names) if command in COMMANDS else []


def _offered(parser: ArgumentParser, words: list[str], names: Names) -> list[str]:
    """For the option that was typed last, or else for the next word and for further options."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    last = words[-1] if words else ""
    if last[-1:] in (",", "+") and len(words) > 1:  # a list goes on
        last = words[-2]
    if last in options and options[last].nargs != 0:
        return _of(options[last], names)
    typed = sum(
        word not in options and not (before in options and options[before].nargs != 0)
        for word, before in zip(words, ["", *words], strict=False)
    )
    places = [action for action in parser._actions if not action.option_strings]
    following = _of(places[typed], names) if typed < len(places) else []
    further = [name for name in options if name.startswith("--") and name not in words]
    return [*following, *further]


def _of(action: Action, names: Names) -> list[str]:
    """Its words, or what it can name in this notebook."""
    if (source := getattr(action, "found", None)) is not None:
        return list(source(names))
    return list(getattr(action, "words", None) or action.choices or ())
