"""Models and optimizers are the user's: what only refers to them keeps none of them alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar
from weakref import ref

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
