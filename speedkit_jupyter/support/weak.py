"""What refers to models and listeners without keeping them alive: they are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakMethod, ref

from speedkit_jupyter.support import messages

T = TypeVar("T")


class Alive(Sequence[T]):
    """Those of the objects that are still there, in their order."""

    def __init__(self, objects: Iterable[T]) -> None:
        self._references = [ref(thing) for thing in objects]

    def __getitem__(self, index: Any) -> Any:
        return self._found()[index]

    def __len__(self) -> int:
        return len(self._found())

    def _found(self) -> list[T]:
        every = [reference() for reference in self._references]
        return [thing for thing in every if thing is not None]


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
