"""Iterators, which can't go back, and their replacements while a step is measured."""

from __future__ import annotations

import gc
import io
import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import GeneratorType
from typing import Any

from speedkit_jupyter.state.handlers.base import StateHandler
from speedkit_jupyter.state.handlers.names import names_of
from speedkit_jupyter.state.ownership import is_installed
from speedkit_jupyter.torchglue.modules import USERS_PARTS, loader_iterator

# Iterators that keep what they have drawn for themselves.
COLLECTING: tuple[type, ...] = (itertools.cycle, type(itertools.tee(())[0]))


class Replay:
    """An iterator whose first draws are repeated at every step, so that all do the same work.

    `next()` begins anew at the end, since a timed step draws more often than the notebook would; a
    loop over it ends there. It draws from `source` and has the other attributes of `original`.
    """

    def __init__(self, original: Iterator[Any], source: Iterator[Any]) -> None:
        self.original, self.drawn = original, list[Any]()
        self._source, self._position = source, 0

    def __iter__(self) -> Iterator[Any]:
        with suppress(StopIteration):
            while True:
                yield self._draw()

    def __next__(self) -> Any:
        try:
            return self._draw()
        except StopIteration:
            if not self.drawn:
                raise
            self.rewind()
            return self._draw()

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or name == "original":  # Python asks for these by itself
            raise AttributeError(name)
        return getattr(self.original, name)

    def __len__(self) -> int:
        return len(self.original)  # type: ignore[arg-type]

    def _draw(self) -> Any:
        if self._position == len(self.drawn):
            self.drawn.append(next(self._source))
        self._position += 1
        return self.drawn[self._position - 1]

    def rewind(self) -> None:
        """Let the next step draw the same again."""
        self._position = 0


class Iterators(StateHandler):
    """Generators, iterators written in C, and iterators of DataLoaders."""

    has_state = False

    def recognizes(self, cls: type) -> bool:
        if issubclass(cls, GeneratorType) or issubclass(cls, loader_iterator()):
            return True
        if not issubclass(cls, Iterator) or issubclass(cls, io.IOBase):
            return False
        return cls.__dictoffset__ == 0 and "__slots__" not in vars(cls)

    def children(self, instance: Any) -> Iterable[Any]:
        """Return what a generator of the user's works on, and what one in C calls and gives out."""
        if isinstance(instance, loader_iterator()):
            yield from (getattr(instance, name, None) for name in USERS_PARTS)
        elif not isinstance(instance, GeneratorType):
            # Only the collector knows what it holds. This one draws from other iterators.
            behind = [] if isinstance(instance, COLLECTING) else gc.get_referents(instance)
            yield from (part for part in behind if not issubclass(type(part), Iterator))
        elif (frame := instance.gi_frame) is not None and not is_installed(
            str(frame.f_globals.get("__name__"))
        ):
            yield from frame.f_locals.values()
            yield names_of([instance.gi_code], frame.f_globals)
