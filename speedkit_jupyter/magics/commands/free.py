"""%speedkit free: what still holds memory, and letting go of it."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from speedkit_jupyter.freeing.freed import Holder, free, of_process
from speedkit_jupyter.magics.line import Command, Names
from speedkit_jupyter.session import Session

# What IPython binds by itself.
HIDDEN = re.compile(r"_+|_\d+|_i+|_i\d+|_[oid]h|In|Out|__.*|exit|quit|get_ipython|open")
LAST = ("_", "__", "___")
OF_AN_ERROR = ("etype", "evalue", "tb")


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Let go, and say of what."""
    shell: Any = get_ipython()
    apart = [names, shell, getattr(shell, "user_ns_hidden", None)]
    display(free(_holders(names, shell), users_names(names), apart))


def users_names(names: Names) -> dict[str, Any]:
    """Return the names that the user has bound."""
    return {name: value for name, value in names.items() if not HIDDEN.fullmatch(name)}


def _holders(names: Names, shell: Any) -> Iterator[Holder]:
    """Python's last error with what IPython keeps of it, outputs, and figures."""
    python, *figures = of_process()
    formatters = [getattr(shell, name, None) for name in ("InteractiveTB", "SyntaxTB")]

    def error() -> list[Any]:
        kept = [getattr(one, name, None) for one in formatters for name in OF_AN_ERROR]
        kept.append(getattr(shell, "last_execution_result", None))
        return [*python.roots(), *(one for one in kept if one is not None)]

    def forget_error() -> None:
        python.let_go()
        for one in formatters:
            for name in OF_AN_ERROR:
                _set(one, name, None)
        _set(shell, "last_execution_result", None)

    yield replace(python, roots=error, let_go=forget_error)
    for number in list(names.get("Out", {})):
        yield Holder(
            f"Out[{number}], _{number}",
            partial(_known, lambda number=number: [names.get("Out", {}).get(number)]),
            partial(_forget_output, names, shell, number),
            "the output's value",
        )
    yield Holder(
        ", ".join(LAST),
        partial(_known, lambda: [names.get(name) for name in LAST]),
        lambda: _forget_last(names, shell, lambda value: True),
    )
    yield from figures


def _known(values: Any) -> list[Any]:
    return [value for value in values() if value is not None]


def _forget_output(names: Names, shell: Any, number: int) -> None:
    """Not where the user has bound another value to `_5`."""
    value = names.get("Out", {}).pop(number, None)
    for space in (names, getattr(shell, "user_ns_hidden", {})):
        if space.get(f"_{number}") is value:
            space.pop(f"_{number}", None)
    _forget_last(names, shell, lambda last: last is value)


def _forget_last(names: Names, shell: Any, chosen: Any) -> None:
    hidden = getattr(shell, "user_ns_hidden", {})
    for name in LAST:
        if name in names and chosen(names[name]):
            names[name] = ""
            _set(getattr(shell, "displayhook", None), name, "")
            if name in hidden:
                hidden[name] = ""


def _set(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        setattr(owner, name, value)


COMMAND = Command("free", "what holds memory after an error or an output, and let go of it", run)
