"""%speedkit free: what still holds memory, and letting go of it."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from IPython import get_ipython
from IPython.display import display

from speedkit_jupyter.freeing import freed
from speedkit_jupyter.freeing.freed import Holder, of_process
from speedkit_jupyter.magics.line import Names, command
from speedkit_jupyter.session import Session

# What IPython binds by itself.
HIDDEN = re.compile(r"_+|_\d+|_i+|_i\d+|_[oid]h|In|Out|__.*|exit|quit|get_ipython|open")
LAST = ("_", "__", "___")
OF_AN_ERROR = ("etype", "evalue", "tb")


@command("what holds memory after an error or an output, and let go of it")
def free(names: Names, session: Session, arguments: Namespace) -> None:
    """Let go, and say of what."""
    shell: Any = get_ipython()
    apart = [names, shell, getattr(shell, "user_ns_hidden", None)]
    users = {name: value for name, value in names.items() if not HIDDEN.fullmatch(name)}
    display(freed.free(_holders(names, shell), users, apart))


def _holders(names: Names, shell: Any) -> Iterator[Holder]:
    """Python's last error with what IPython keeps of it, outputs, and figures."""
    python, *figures = of_process()
    kept = [(getattr(shell, one, None), at) for one in ("InteractiveTB", "SyntaxTB")
            for at in OF_AN_ERROR]  # fmt: skip
    kept.append((shell, "last_execution_result"))

    def of_error() -> list[Any]:
        values = (getattr(owner, at, None) for owner, at in kept)
        return [*python.roots(), *(value for value in values if value is not None)]

    def forget_error() -> None:
        python.let_go()
        for owner, at in kept:
            if hasattr(owner, at):
                setattr(owner, at, None)

    yield replace(python, roots=of_error, let_go=forget_error)
    outputs = names.get("Out", {})
    for number in list(outputs):
        word = f"Out[{number}], _{number}"
        yield _output(names, shell, word, outputs, number)
    for name in LAST:
        yield _output(names, shell, name, names, name)
    yield from figures


def _output(names: Names, shell: Any, word: str, owner: Any, key: Any) -> Holder:
    def forget() -> None:
        """Also under IPython's other names for it, but not where the user has bound another."""
        value = owner.get(key)
        if value is None:
            return
        names.get("Out", {}).pop(key, None)
        for space in (names, getattr(shell, "user_ns_hidden", {})):
            for name in (*LAST, f"_{key}"):
                if space.get(name) is value:
                    space[name] = ""
        for name in LAST:
            if getattr(getattr(shell, "displayhook", None), name, None) is value:
                setattr(shell.displayhook, name, "")

    roots: Callable[[], list[Any]] = lambda: [v for v in [owner.get(key)] if v is not None]  # noqa: E731
    return Holder(word, roots, forget, "the output's value")
