"""Complete the lines of SpeedKit's magics on Tab. Importing this module must stay fast."""

from __future__ import annotations

from argparse import Action
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core import completer

if TYPE_CHECKING:
    from speedkit_jupyter.notebook.options import Parser

MAGICS = ("%speedkit", "%%speedkit", "%speedbench", "%%speedbench")
IDENTIFIER = "speedkit"


def add_completion(shell: Any) -> None:
    """Complete SpeedKit's lines on Tab. If SpeedKit offers words, show no other words."""
    # IPython before 8.6 has only a hook, whose results are mixed with Python's names.
    if not hasattr(completer, "context_matcher"):
        for name in MAGICS:
            shell.set_hook("complete_command", _completed, str_key=name)
        return

    @completer.context_matcher(identifier=IDENTIFIER, priority=1000)  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> dict[str, Any]:
        line, token = context.text_until_cursor, context.token
        is_ours = line.lstrip().startswith(MAGICS)
        words = complete(line[: len(line) - len(token)], shell.user_ns) if is_ours else []
        found = [completer.SimpleCompletion(word) for word in words if word.startswith(token)]
        return {"completions": found, "suppress": bool(found), "ordered": True}

    shell.Completer.custom_matchers.append(matcher)


def remove_completion(shell: Any) -> None:
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != IDENTIFIER]
    for name in MAGICS:
        shell.strdispatchers["complete_command"].strs.pop(name, None)


def _completed(shell: Any, event: Any) -> list[str]:
    return complete(event.line[: len(event.line) - len(event.symbol)], shell.user_ns)


def complete(before: str, names: Mapping[str, Any]) -> list[str]:
    """Return the possible next words of an incomplete `%speedkit` or `%%speedbench` line."""
    from speedkit_jupyter.notebook.commands import commands
    from speedkit_jupyter.notebook.speedbench import parser

    name, *words = before.split() or [""]
    if name.endswith("speedbench"):
        return _offered(parser(), words, names)
    if not words:
        return list(commands())
    known = commands().get(words[0])
    return _offered(known, words[1:], names) if known else []


def _offered(parser: Parser, words: list[str], names: Mapping[str, Any]) -> list[str]:
    """Return the words that may come next: values of the last option, arguments or options."""
    options, places = parser._option_string_actions, parser._get_positional_actions()

    def offered(action: Action) -> list[str]:
        about = parser.about[action.dest]
        return list(about.found(names)) if about.found else list(about.words)

    takes = {name for name, action in options.items() if action.nargs != 0}
    last = words[-1:]
    if last and last[0][-1] in ",+":  # the list continues
        last = words[-2:-1]
    if last and last[0] in takes:
        return offered(options[last[0]])
    pairs = zip(["", *words], words, strict=False)
    typed = sum(word not in options and before not in takes for before, word in pairs)
    further = [name for name in options if name.startswith("--") and name not in words]
    return [*(offered(places[typed]) if typed < len(places) else ()), *further]
