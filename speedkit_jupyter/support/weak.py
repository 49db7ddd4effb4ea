"""References to the user's objects that don't keep them alive, and calls at the extension's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakMethod, ref

from speedkit_jupyter.support import messages

T = TypeVar("T")
# State at module level, on purpose: running threads and processes belong to the process.
_ENDS: dict[str, Callable[[], object]] = {}


class Alive(Sequence[T]):
    """The objects that still exist, in their order."""

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
    """Bound methods that are called at each `tell`, as long as their objects live."""

    def __init__(self) -> None:
        self._methods: list[WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        self._methods = [old for old in self._methods if old() is not None] + [WeakMethod(method)]

    def tell(self, *news: Any) -> None:
        """Call all methods. An error in one is a warning: the caller's work is done already."""
        for method in filter(None, [reference() for reference in self._methods]):
            try:
                method(*news)
            except Exception as error:
                messages.warn(f"a listener failed: {type(error).__name__}: {error}")


def at_unload(end: Callable[[], object]) -> None:
    """Call a function once when the extension is unloaded, however often it is registered."""
    _ENDS[f"{end.__module__}.{end.__qualname__}"] = end


def unload() -> None:
    """Call all registered functions, the first one first."""
    while _ENDS:
        _ENDS.pop(next(iter(_ENDS)))()
