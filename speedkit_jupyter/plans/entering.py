"""A block that is chosen when it is entered, not when it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any


class Entering(ContextDecorator):
    """`make()` at every entry; a decorator too, made once and entered often, nested, in threads.

    So code that keeps one, or decorates a function with it, gets what is in force by then.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inside: dict[int, list[AbstractContextManager[Any]]] = {}

    def __enter__(self) -> Any:
        chosen = self._make()
        result = chosen.__enter__()
        self._inside.setdefault(threading.get_ident(), []).append(chosen)
        return result

    def __exit__(self, *exception: Any) -> bool | None:
        here = threading.get_ident()
        mine = self._inside[here]
        chosen = mine.pop()
        if not mine:  # threads come and go
            del self._inside[here]
        return chosen.__exit__(*exception)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entering:
        """A copy of a module that keeps one asks the same context."""
        return Entering(self._make)
