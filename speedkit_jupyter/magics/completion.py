"""Tab completion, made of the parsers: subcommands, options, their words, and what they name."""

from __future__ import annotations

from argparse import Action
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speedkit_jupyter.magics.line import Parser

MAGICS = ("%speedkit", "%%speedbench")


def add_completion(shell: Any) -> None:
    """Have Tab offer our words on our lines.

    An IPython before 8.6 has no matchers of others, and mixes Python's own names in.
    """
    from IPython.core import completer

    if hasattr(completer, "SimpleCompletion"):
        shell.Completer.custom_matchers.append(_Matcher(shell))
    else:
        for name in MAGICS:
            shell.set_hook("complete_command", _completed, str_key=name)


def remove_completion(shell: Any) -> None:
    """Take it away again."""
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [matcher for matcher in matchers if not isinstance(matcher, _Matcher)]
    for name in MAGICS:
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
        is_ours = line.lstrip().startswith(MAGICS)
        words = complete(line[: len(line) - len(token)], self._shell.user_ns) if is_ours else []
        found = [SimpleCompletion(word) for word in words if word.startswith(token)]
        return {"completions": found, "suppress": bool(found), "ordered": True}


def _completed(shell: Any, event: Any) -> list[str]:
    """The same for the hook of an older IPython."""
    return complete(event.line[: len(event.line) - len(event.symbol)], shell.user_ns)


def complete(before: str, names: Mapping[str, Any]) -> list[str]:
    """Return what may stand behind the beginning of a `%speedkit` or `%%speedbench` line."""
    from speedkit_jupyter.magics.commands import COMMANDS
    from speedkit_jupyter.magics.options import speedbench_parser

    magic, *words = before.split() or [""]
    if magic == "%%speedbench":
        return _offered(speedbench_parser(), words, names)
    if not words:
        return list(COMMANDS)
    known = COMMANDS.get(words[0])
    return _offered(known.parser, words[1:], names) if known else []


def _offered(parser: Parser, words: list[str], names: Mapping[str, Any]) -> list[str]:
    """For the option that was typed last, or else for the next word and for further options."""
    options, places = parser._option_string_actions, parser._get_positional_actions()

    def offered(action: Action) -> list[str]:
        about = parser.about[action.dest]
        return list(about.found(names)) if about.found else list(about.words)

    takes = {name for name, action in options.items() if action.nargs != 0}
    last = words[-1:]
    if last and last[0][-1] in ",+":  # a list goes on
        last = words[-2:-1]
    if last and last[0] in takes:
        return offered(options[last[0]])
    pairs = zip(["", *words], words, strict=False)
    typed = sum(word not in options and before not in takes for before, word in pairs)
    further = [name for name in options if name.startswith("--") and name not in words]
    return [*(offered(places[typed]) if typed < len(places) else ()), *further]
