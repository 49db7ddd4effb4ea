"""Weak references to the user's objects and listeners, and functions called at unloading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakMethod, ref

from speedkit_jupyter.support import messages

T = TypeVar("T")
# The functions that `unload` calls, by name. They undo changes to the process.
_ENDS: dict[str, Callable[[], object]] = {}


class Alive(Sequence[T]):
    """Weak references to objects; iteration yields the living ones in order."""

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
    """Weakly referenced bound methods, called by `tell` while their objects are alive."""

    def __init__(self) -> None:
        self._methods: list[WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        self._methods = [old for old in self._methods if old() is not None] + [WeakMethod(method)]

    def tell(self, *news: Any) -> None:
        """Call all methods. An error becomes a warning, because the caller's work is done."""
        for method in filter(None, [reference() for reference in self._methods]):
            try:
                method(*news)
            except Exception as error:
                messages.warn(f"updating a display failed: {type(error).__name__}: {error}")


def at_unload(end: Callable[[], object]) -> None:
    """Register a function that `unload` calls once, even if it is registered several times."""
    _ENDS[f"{end.__module__}.{end.__qualname__}"] = end


def unload() -> None:
    """Unregister and call the functions of `at_unload`, in order of registration."""
    while _ENDS:
        _ENDS.pop(next(iter(_ENDS)))()
