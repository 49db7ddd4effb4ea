"""%speedkit free: what still holds memory, and letting go of it."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.session import Session

# What IPython binds by itself.
HIDDEN = re.compile(r"_+|_\d+|_i+|_i\d+|_[oid]h|In|Out")
OURS_OF_THE_SHELL = ("exit", "quit", "get_ipython", "open")


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Let go, and say of what."""
    from speedkit_jupyter.freeing.freed import free

    shell = get_ipython()
    apart = [names, shell, getattr(shell, "user_ns_hidden", None)]
    display(free(_holders(names, shell), users_names(names), apart))


def users_names(names: Names) -> dict[str, Any]:
    """Those that the user has bound."""
    return {
        name: value
        for name, value in names.items()
        if not (HIDDEN.fullmatch(name) or name in OURS_OF_THE_SHELL or name[:2] == "__")
    }


def _holders(names: Names, shell: Any) -> Iterator[Any]:
    from dataclasses import replace

    from speedkit_jupyter.freeing.holders import Holder, of_process

    python, *figures = of_process()
    yield replace(
        python,
        roots=lambda: [*python.roots(), *_error_of(shell)],
        let_go=partial(_forget_errors, python, shell),
    )
    for number in list(names.get("Out", {})):
        yield Holder(
            f"Out[{number}], _{number}",
            partial(_output, names, number),
            partial(_forget_output, names, shell, number),
            "the output's value",
        )
    yield Holder("_, __, ___", lambda: _last(names), lambda: _forget_last(names, shell))
    yield from figures


def _error_of(shell: Any) -> list[Any]:
    """What IPython keeps for %debug, and of the cell before."""
    kept = [getattr(shell, "last_execution_result", None)]
    for formatter in _formatters(shell):
        kept += [getattr(formatter, name, None) for name in ("etype", "evalue", "tb")]
    return [one for one in kept if one is not None]


def _formatters(shell: Any) -> list[Any]:
    found = [getattr(shell, name, None) for name in ("InteractiveTB", "SyntaxTB")]
    return [one for one in found if one is not None]


def _forget_errors(python: Any, shell: Any) -> None:
    python.let_go()
    _forget_error(shell)


def _forget_error(shell: Any) -> None:
    for formatter in _formatters(shell):
        for name in ("etype", "evalue", "tb"):
            if hasattr(formatter, name):
                setattr(formatter, name, None)
    if hasattr(shell, "last_execution_result"):
        shell.last_execution_result = None


def _output(names: Names, number: int) -> list[Any]:
    return [value for value in (names.get("Out", {}).get(number),) if value is not None]


def _forget_output(names: Names, shell: Any, number: int) -> None:
    """Not where the user has bound another value to `_5`."""
    value = names.get("Out", {}).pop(number, None)
    for space in (names, getattr(shell, "user_ns_hidden", {})):
        if space.get(f"_{number}") is value:
            space.pop(f"_{number}", None)
    for name in ("_", "__", "___"):
        if names.get(name) is value:
            _empty(names, shell, name)


def _last(names: Names) -> list[Any]:
    return [names[name] for name in ("_", "__", "___") if names.get(name) is not None]


def _forget_last(names: Names, shell: Any) -> None:
    for name in ("_", "__", "___"):
        if name in names:
            _empty(names, shell, name)


def _empty(names: Names, shell: Any, name: str) -> None:
    names[name] = ""
    hook, hidden = getattr(shell, "displayhook", None), getattr(shell, "user_ns_hidden", {})
    if hook is not None and hasattr(hook, name):
        setattr(hook, name, "")
    if name in hidden:
        hidden[name] = ""


COMMAND = Command("free", "what holds memory after an error or an output, and let go of it", run)
