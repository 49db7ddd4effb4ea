"""Who holds memory that no name of the user's stands for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LAST = ("last_traceback", "last_value", "last_exc", "last_type")


@dataclass(frozen=True)
class Holder:
    """`roots` gives what it holds now, `let_go` makes it hold nothing; `loses` is what is gone
    afterwards.
    """

    name: str
    roots: Callable[[], list[Any]]
    let_go: Callable[[], object]
    loses: str = ""


def of_process() -> Iterator[Holder]:
    """Python's own: the last error, and figures that pyplot keeps open."""
    yield Holder(
        "the last error",
        lambda: [getattr(sys, name) for name in LAST if hasattr(sys, name)],
        _forget_error,
        "%debug and %tb of it",
    )
    yield from _figures()


def _forget_error() -> None:
    for name in LAST:
        if hasattr(sys, name):
            delattr(sys, name)


def _figures() -> Iterator[Holder]:
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None:
        return
    for manager in list(helpers.Gcf.get_all_fig_managers()):
        yield Holder(
            f"figure {manager.num}, which pyplot keeps open",
            lambda manager=manager: [manager.canvas.figure],  # type: ignore[misc]
            lambda manager=manager: helpers.Gcf.destroy(manager),  # type: ignore[misc]
            "drawing into it with plt",
        )
