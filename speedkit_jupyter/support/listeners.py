"""Who wants to know that something changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from speedkit_jupyter.support import messages


class Listeners:
    """Bound methods that are called with every `tell`; their objects are not kept alive by it."""

    def __init__(self) -> None:
        self._methods: list[WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        """Call this bound method from now on, as long as its object lives."""
        self._methods = [old for old in self._methods if old() is not None] + [WeakMethod(method)]

    def tell(self, *news: Any) -> None:
        """Call all. What goes wrong in one is a warning: it must not undo what it is told of."""
        for method in filter(None, [reference() for reference in self._methods]):
            try:
                method(*news)
            except Exception as error:
                messages.warn(f"a listener failed: {type(error).__name__}: {error}")
