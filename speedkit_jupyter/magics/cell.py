"""A cell as a step: its code compiled once, and what it reads and assigns."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from IPython.core.error import UsageError


class Cell:
    """The code of a cell: run it again and again in the user's namespace.

    Raises SyntaxError for code that does not compile, UsageError for what can't be measured.
    """

    def __init__(self, shell: Any, source: str) -> None:
        __tracebackhide__ = True
        transformed = shell.transform_cell(source)
        self.tree: ast.Module = shell.transform_ast(shell.compile.ast_parse(transformed))
        if not self.tree.body:
            raise UsageError("%%speedbench: the cell is empty: write the step to measure in it")
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
                raise UsageError("%%speedbench: a step with top-level await can't be measured")
        # Under a name that IPython knows, so that a traceback shows the cell's own lines.
        self._code = shell.compile(self.tree, shell.compile.cache(transformed), "exec")
        self._names = shell.user_ns

    def run(self) -> None:
        """One step."""
        __tracebackhide__ = True
        exec(self._code, self._names)

    def assigned(self) -> list[str]:
        """The names that the cell binds or deletes."""
        bound = {
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update((a.asname or a.name).partition(".")[0] for a in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
        return sorted(bound)

    def reads(self, name: str) -> bool:
        """Whether the cell's own code uses a name."""
        return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(self.tree))

    def objects(self) -> list[Any]:
        """Every object that the cell's code reaches by name, also through the user's functions."""
        found: dict[int, Any] = {}
        for value in _named(self.tree, self._names):
            _reach(value, found, depth=4)
        return list(found.values())


def _named(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[Any]:
    """The values of names and dotted names in the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        elif isinstance(node, ast.Attribute):
            value = _attribute(node, names)
            if value is not None:
                yield value


def _attribute(node: ast.Attribute, names: Mapping[str, Any]) -> Any:
    """The value of `a.b.c`, read from instance dictionaries only, so that nothing is run."""
    if isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
    elif isinstance(node.value, ast.Attribute):
        owner = _attribute(node.value, names)
    else:
        return None
    if isinstance(owner, ModuleType):
        return None
    return getattr(owner, "__dict__", {}).get(node.attr)


def _reach(value: Any, found: dict[int, Any], depth: int) -> None:
    """Functions lead to their globals and closures, plain objects to what they hold."""
    if id(value) in found or depth == 0 or isinstance(value, ModuleType):
        return
    found[id(value)] = value
    if isinstance(value, MethodType):
        _reach(value.__self__, found, depth)
        value = value.__func__
    if isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for one in (*variables.nonlocals.values(), *variables.globals.values()):
            _reach(one, found, depth - 1)
    elif isinstance(value, list | tuple) and len(value) <= 32:
        for one in value:
            _reach(one, found, depth - 1)
    elif isinstance(value, dict) and len(value) <= 32:
        for one in list(value.values()):
            _reach(one, found, depth - 1)
    elif _is_the_users(value):
        for one in list(vars(value).values()):
            _reach(one, found, depth - 1)


def _is_the_users(value: Any) -> bool:
    """An instance of a class that was written in the notebook or in the user's own files."""
    import torch

    home = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | torch.Tensor)
        and home not in ("torch", "numpy", "builtins", "IPython", "speedkit_jupyter")
    )
