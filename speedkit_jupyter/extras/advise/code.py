"""The user's own code that ran in a step, as syntax trees."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType
from typing import Any, TypeVar

from speedkit_jupyter.support.source_lines import Spot, is_users

N = TypeVar("N", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CodePart:
    """Code of one function, or of a cell without its functions."""

    code: CodeType
    tree: ast.AST

    def nodes(self, *kinds: type[N]) -> Iterator[N]:
        """Yield those of these kinds, not those of functions inside of it."""
        waiting = list(ast.iter_child_nodes(self.tree))
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, kinds):
                yield node
            if not isinstance(node, Function | ast.ClassDef):
                waiting += ast.iter_child_nodes(node)

    @cached_property
    def _parents(self) -> dict[int, ast.AST]:
        around = ast.walk(self.tree)
        return {id(child): node for node in around for child in ast.iter_child_nodes(node)}

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and id(node) in self._parents:
            node = self._parents[id(node)]
        return node

    def spots(self, node: ast.AST) -> tuple[Spot, ...]:
        first = getattr(node, "lineno", 0)
        last = getattr(node, "end_lineno", None) or first
        return tuple(Spot(self.code.co_filename, at) for at in range(first, last + 1))


class StepCode:
    """What ran; `parts` in the order of files and lines."""

    def __init__(self, ran: Iterable[CodeType]) -> None:
        trees: dict[str, ast.Module | None] = {}
        self.parts: list[CodePart] = []
        for code in sorted(ran, key=lambda one: (one.co_filename, one.co_firstlineno, one.co_name)):
            file = code.co_filename
            if file not in trees:
                trees[file] = None
                with suppress(SyntaxError, ValueError, RecursionError):
                    trees[file] = ast.parse("".join(linecache.getlines(file)))
            tree = _tree(trees[file], code)
            if tree is not None:
                self.parts.append(CodePart(code, tree))

    def nodes(self, *kinds: type[N]) -> Iterator[tuple[CodePart, N]]:
        """Return those of these kinds, of all that ran."""
        return ((part, node) for part in self.parts for node in part.nodes(*kinds))

    def calls(self, *names: str) -> Iterator[tuple[CodePart, ast.Call]]:
        """Return calls of what ends in one of these dotted names: `tensor` finds `torch.tensor`."""
        return (found for found in self.nodes(ast.Call) if is_called(found[1], *names))


def is_called(node: ast.AST, *names: str) -> bool:
    """Return whether it calls what ends in one of these dotted names."""
    if not isinstance(node, ast.Call):
        return False
    called = dotted(node.func)
    return any(called == name or called.endswith(f".{name}") for name in names)


def dotted(node: ast.AST) -> str:
    """Return `torch.nn.functional.softmax`; `?` in the place of what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def what_ran(call: Callable[[], object]) -> set[CodeType]:
    """Return the user's functions that the call runs in this thread; none if a profiler listens."""
    ran = set[CodeType]()
    if sys.getprofile() is not None:
        call()
        return ran

    def listen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_users(frame.f_code.co_filename):
            ran.add(frame.f_code)

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


def _tree(module: ast.Module | None, code: CodeType) -> ast.AST | None:
    """Return what the code was compiled from. Comprehensions and lambdas are part of another."""
    if module is None or code.co_name == "<module>":
        return module
    for node in ast.walk(module):
        if isinstance(node, Function) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if code.co_firstlineno in (first, node.lineno):
                return node
    return None
