"""Loops of a cell that tell what they wait for, whatever they go through."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.profiling.outside_modules import Outside

# What is at hand already makes nobody wait; torch's loaders are seen wherever they are used.
AT_HAND = (range, list, tuple, dict, set, frozenset, str)


class Loops:
    """Every `for` of the code that is `rewritten` goes through this object's call.

    It is found among Python's built-in names, while the code runs: nothing is added to the user's.
    """

    name = "_speedbench_waits"

    def __init__(self) -> None:
        self._outside: Outside | None = None

    def rewritten(self, tree: ast.Module) -> ast.Module:
        """The same code, line by line; the loops of functions that it defines, too."""
        _Rewriting(self.name).visit(tree)
        return ast.fix_missing_locations(tree)

    @contextmanager
    def told_to(self, outside: Outside | None) -> Iterator[None]:
        """In the block the code can run; the split, if there is one, learns what it waits for."""
        self._outside = outside
        setattr(builtins, self.name, self)
        try:
            yield
        finally:
            self._outside = None
            delattr(builtins, self.name)

    def __call__(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """What the loop goes through in place of this."""
        is_at_hand = isinstance(iterable, AT_HAND) or hasattr(type(iterable), "__array__")
        if self._outside is None or is_at_hand:
            return iterable
        return _waited(self._outside, iterable)


def _waited(outside: Outside, iterable: Iterable[Any]) -> Iterator[Any]:
    with outside.within("data"):
        draws = iter(iterable)
    while True:
        try:
            with outside.within("data"):
                drawn = next(draws)
        except StopIteration:
            return
        yield drawn


class _Rewriting(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self._name = name

    def visit_For(self, node: ast.For) -> ast.For:
        """`for x in xs` goes through `name(xs)`."""
        self.generic_visit(node)
        called = ast.Call(ast.Name(self._name, ast.Load()), [node.iter], [])
        node.iter = ast.copy_location(called, node.iter)
        return node
