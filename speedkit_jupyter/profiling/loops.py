"""What the loops of a cell wait for is data."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.profiling.instruments import Recorder

# What is at hand already makes nobody wait; torch's loaders are seen wherever they are used.
AT_HAND = (range, list, tuple, dict, set, frozenset, str)


class Loops:
    """Every `for` of the code that is `rewritten` goes through this object's call.

    It is found among Python's built-in names, while the code runs: nothing is added to the user's.
    """

    name = "_speedbench_waits"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def rewritten(self, tree: ast.Module) -> ast.Module:
        """Return the same code, line by line; the loops of functions that it defines, too."""
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                called = ast.Call(ast.Name(self.name, ast.Load()), [node.iter], [])
                node.iter = ast.copy_location(called, node.iter)
        return ast.fix_missing_locations(tree)

    @contextmanager
    def told_to(self, recorder: Recorder | None) -> Iterator[None]:
        """Let the code run in the block; the recorder, if there is one, learns of the waits."""
        self._recorder = recorder
        setattr(builtins, self.name, self)
        try:
            yield
        finally:
            self._recorder = None
            delattr(builtins, self.name)

    def __call__(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return what the loop goes through in place of this."""
        is_at_hand = isinstance(iterable, AT_HAND) or hasattr(type(iterable), "__array__")
        if self._recorder is None or is_at_hand:
            return iterable
        return _waited(self._recorder, iterable)


def _waited(recorder: Recorder, iterable: Iterable[Any]) -> Iterator[Any]:
    with recorder.within("data"):
        draws = iter(iterable)
    while True:
        try:
            with recorder.within("data"):
                drawn = next(draws)
        except StopIteration:
            return
        yield drawn
