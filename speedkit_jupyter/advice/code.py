"""The user's own code that ran in a step, as syntax trees."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FrameType
from typing import Any, TypeVar

from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.line_times import Spot

N = TypeVar("N", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
# Of a module, what a cell or a file is.
MODULE = "<module>"


@dataclass(frozen=True)
class Part:
    """Code of one function, or of a cell without its functions, and how often it ran."""

    code: CodeType
    tree: ast.AST
    times: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    def nodes(self, *kinds: type[N]) -> Iterator[N]:
        """Of these kinds, not those of functions inside of it."""
        waiting = list(ast.iter_child_nodes(self.tree))
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, kinds):
                yield node
            if not isinstance(node, Function | ast.ClassDef):
                waiting += ast.iter_child_nodes(node)

    @cached_property
    def _parents(self) -> dict[int, ast.AST]:
        around = ((node, child) for node in ast.walk(self.tree) for child in _children(node))
        return {id(child): node for node, child in around}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What it stands in, the innermost first."""
        parent = self._parents.get(id(node))
        while parent is not None:
            yield parent
            parent = self._parents.get(id(parent))

    def statement(self, node: ast.AST) -> ast.AST:
        """The one that it stands in."""
        if isinstance(node, ast.stmt):
            return node
        return next((one for one in self.around(node) if isinstance(one, ast.stmt)), node)

    def loop(self, node: ast.AST) -> ast.AST | None:
        """The innermost loop that it stands in."""
        return next((one for one in self.around(node) if isinstance(one, LOOPS)), None)

    def spots(self, node: ast.AST) -> tuple[Spot, ...]:
        """All lines of it."""
        first, last = extent(node)
        return tuple(Spot(self.file, number) for number in range(first, last + 1))


class Code:
    """What ran; `parts` in the order of files and lines."""

    def __init__(self, ran: Mapping[CodeType, int]) -> None:
        trees: dict[str, ast.Module | None] = {}
        self.parts: list[Part] = []
        for code, times in sorted(ran.items(), key=lambda item: _place(item[0])):
            if code.co_filename not in trees:
                trees[code.co_filename] = _parsed(code.co_filename)
            tree = _tree(trees[code.co_filename], code)
            if tree is not None:
                self.parts.append(Part(code, tree, times))

    def nodes(self, *kinds: type[N]) -> Iterator[tuple[Part, N]]:
        """Of these kinds, of all that ran."""
        for part in self.parts:
            for node in part.nodes(*kinds):
                yield part, node

    def calls(self, *names: str) -> Iterator[tuple[Part, ast.Call]]:
        """Calls of what ends in one of these dotted names: `tensor` finds `torch.tensor` too."""
        for part, node in self.nodes(ast.Call):
            if is_called(node, *names):
                yield part, node


def is_called(node: ast.AST, *names: str) -> bool:
    """Whether it calls what ends in one of these dotted names."""
    if not isinstance(node, ast.Call):
        return False
    called = dotted(node.func)
    return any(called == name or called.endswith(f".{name}") for name in names)


def dotted(node: ast.AST) -> str:
    """`torch.nn.functional.softmax`; of what is no name, `?` in its place."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def names_in(node: ast.AST) -> set[str]:
    """All plain names in it."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """What is given by this name."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_constant(node: ast.AST | None, value: Any) -> bool:
    """Whether it is written as this very value."""
    return isinstance(node, ast.Constant) and node.value is value


def extent(node: ast.AST) -> tuple[int, int]:
    """Its first line and its last."""
    first = getattr(node, "lineno", 0)
    return first, getattr(node, "end_lineno", None) or first


def what_ran(call: Callable[[], object]) -> Counter[CodeType]:
    """How often each function of the user's is called meanwhile, in this thread.

    Nothing where somebody else (a profiler) listens to calls already.
    """
    ran = Counter[CodeType]()
    if sys.getprofile() is not None:
        call()
        return ran

    def listen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and user_lines.is_users(frame.f_code.co_filename):
            ran[frame.f_code] += 1

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


def _children(node: ast.AST) -> Iterable[ast.AST]:
    return ast.iter_child_nodes(node)


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _parsed(file: str) -> ast.Module | None:
    with suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse("".join(linecache.getlines(file)))
    return None


def _tree(module: ast.Module | None, code: CodeType) -> ast.AST | None:
    """The node that the code was compiled from. Comprehensions and lambdas are part of another."""
    if module is None:
        return None
    if code.co_name == MODULE:
        return module
    for node in ast.walk(module):
        if isinstance(node, Function) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno or node.lineno == code.co_firstlineno:
                return node
    return None
