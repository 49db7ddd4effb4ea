"""What stands in for an iterator: while a step is measured, and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

# Ways to advance a generator beside `next()`: these draws are not given again.
DRIVES = frozenset(["send", "throw", "close", "asend", "athrow", "aclose"])


class Replay:
    """An iterator whose first draws are repeated at every step, so that all do the same work.

    `next()` begins anew at the end, since a step that is timed draws more often than the notebook
    would; a loop over it ends there. Without `rewinds` (for what another iterator that rewinds
    draws from) nothing is repeated. All other attributes are the source's.
    """

    replays = True
    driven = False  # whether the step used another way to advance it

    def __init__(self, source: Iterator[Any], rewinds: bool = True) -> None:
        self._source, self._rewinds = source, rewinds
        self._drawn: list[Any] = []
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield self._draw()
            except StopIteration:
                return

    def __next__(self) -> Any:
        try:
            return self._draw()
        except StopIteration:
            if not self._drawn or not self._rewinds:
                raise
            self.rewind()
            return self._draw()

    def __getattr__(self, name: str) -> Any:
        return _of_the_source(self, name)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def _draw(self) -> Any:
        if self._position == len(self._drawn):
            self._drawn.append(next(self._source))
        self._position += 1
        return self._drawn[self._position - 1]

    def rewind(self) -> None:
        """Let the next step draw the same again."""
        if self._rewinds:
            self._position = 0

    def draws_from(self, iterator: Any) -> bool:
        """Return whether it draws from this very iterator, not from a copy."""
        return self._source is iterator

    def as_found(self) -> Iterator[Any]:
        """Return an iterator that gives what the source would have given."""
        return Resumed(self._drawn, self._source) if self._drawn else self._source


class Resumed:
    """What was drawn from an iterator of the user's, then the rest of it.

    `used` tells whether anything was drawn from it since it was handed back. All other attributes
    are the iterator's.
    """

    resumes = True
    used = False

    def __init__(self, drawn: Sequence[Any], source: Iterator[Any]) -> None:
        self._drawn, self._source = list(drawn), source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.used = True
        return self._drawn.pop(0) if self._drawn else next(self._source)

    def __getattr__(self, name: str) -> Any:
        return _of_the_source(self, name)


def _of_the_source(iterator: Any, name: str) -> Any:
    """Return the source's attribute, but none that Python asks for by itself."""
    if name[:2] == "__" or name == "_source":
        raise AttributeError(name)
    if name in DRIVES:
        vars(iterator)["driven"] = True
    return getattr(iterator._source, name)
