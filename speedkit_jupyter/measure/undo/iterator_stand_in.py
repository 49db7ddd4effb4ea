"""What stands in for an iterator: while a step is measured, and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from speedkit_jupyter.measure.undo.loaders import Epoch

# What advances a generator beside `next()`: what it is given is not given again.
DRIVES = frozenset(["send", "throw", "close", "asend", "athrow", "aclose"])


class Replay:
    """An iterator whose first draws are repeated at every step, so that all do the same work.

    `next()` begins anew at the end, since a step that is timed draws more often than the notebook
    would; a loop over it ends there. Without `keeps` (a counter) nothing is repeated, without
    `rewinds` (what another one that does draws from) nothing before the end. `owner` is what the
    source draws from, and has to be put back with it. All else is the source's.
    """

    replays = True
    driven = False  # whether it was asked for what advances a generator otherwise

    def __init__(
        self,
        source: Iterator[Any],
        keeps: bool = True,
        rewinds: bool = True,
        owner: Any = None,
    ) -> None:
        self._source, self._drawn, self._position = source, [], 0  # type: ignore[var-annotated]
        self._keeps, self._rewinds, self._owner = keeps, rewinds, owner

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
        if not self._keeps:
            return next(self._source)
        if self._position == len(self._drawn):
            self._drawn.append(next(self._source))
        self._position += 1
        return self._drawn[self._position - 1]

    def rewind(self) -> None:
        """The next step draws the same again."""
        if self._rewinds:
            self._position = 0

    def draws_from(self, iterator: Any) -> bool:
        """Whether `found` itself is drawn from, and not another one in its place."""
        return self._source is iterator

    def as_found(self) -> Iterator[Any]:
        """An iterator that gives what the source would have given."""
        return Resumed(self._drawn, self._source) if self._drawn else self._source


class OfOneEpoch(Replay):
    """Of a loader that keeps its workers: where the step begins another epoch, this one ends."""

    _source: Epoch

    def is_untouched(self) -> bool:
        """Whether the iterator itself stands where it stood."""
        return not self._drawn and not self._source.is_over

    def as_found(self) -> Iterator[Any]:
        """What is left of the epoch, as far as it is there."""
        if self._source.is_over:
            return Resumed(self._drawn, iter(()))
        return RestOfEpoch(self._drawn, Epoch(self._source.iterator))


class Resumed:
    """What was drawn from an iterator of the user's, then the rest of it; all else is its own."""

    resumes = True

    def __init__(self, drawn: Sequence[Any], source: Iterator[Any]) -> None:
        self._drawn, self._source = list(drawn), source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._drawn.pop(0) if self._drawn else next(self._source)

    def __getattr__(self, name: str) -> Any:
        return _of_the_source(self, name)


class RestOfEpoch(Resumed):
    """The loader's own iterator, once that begins another epoch."""

    keeps_workers = True
    _source: Epoch

    def __next__(self) -> Any:
        if self._source.is_over:
            self._drawn = []
            return next(self._source.iterator)
        return super().__next__()


class Lent:
    """An iterator of the user's for a while; it knows whether anything was drawn from it."""

    resumes = True

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self.used = source, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.used = True
        return next(self._source)

    def __getattr__(self, name: str) -> Any:
        return _of_the_source(self, name)


def _of_the_source(iterator: Any, name: str) -> Any:
    """Not what Python looks for by itself, when it copies one, say."""
    if name[:2] == "__" or name == "_source":
        raise AttributeError(name)
    if name in DRIVES:
        vars(iterator)["driven"] = True
    return getattr(iterator._source, name)
