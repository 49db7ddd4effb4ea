"""A block that is chosen when it is entered, not when it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from threading import get_ident
from typing import Any


class Entering(ContextDecorator):
    """`make()` at every entry; a decorator too, made once and entered often, nested, in threads.

    So code that keeps one, or decorates a function with it, gets what is in force by then.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        # By thread: the innermost block that is open, and what is open around it.
        self._inside: dict[int, tuple[AbstractContextManager[Any], Any]] = {}

    def __enter__(self) -> Any:
        chosen = self._make()
        result = chosen.__enter__()
        inside, here = self._inside, get_ident()
        inside[here] = chosen, inside.get(here)
        return result

    def __exit__(self, *exception: Any) -> bool | None:
        here = get_ident()
        chosen, around = self._inside.pop(here)  # threads come and go
        if around is not None:
            self._inside[here] = around
        return chosen.__exit__(*exception)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entering:
        """Return one that asks the same context, for a copy of a module that keeps it."""
        return Entering(self._make)
