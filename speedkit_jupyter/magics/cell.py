"""A cell as a step: its code compiled once, and what it reads and assigns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import IOBase, TextIOBase
from types import ModuleType
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.measure.reach import reached


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
        name = shell.compile.cache(transformed)
        body, last = list(self.tree.body), None
        if isinstance(body[-1], ast.Expr):
            last = ast.Expression(body.pop().value)  # type: ignore[attr-defined]
        self._code = shell.compile(ast.Module(body, []), name, "exec")
        self._last = shell.compile(last, name, "eval") if last else None
        self._names = shell.user_ns
        self._has_run, self._silence = False, _Silence()

    def run(self) -> Any:
        """One step; gives the value of a trailing expression. Only the first one may print."""
        __tracebackhide__ = True
        if not self._has_run:
            self._has_run = True
            return self._run()
        with redirect_stdout(self._silence), redirect_stderr(self._silence):
            return self._run()

    def _run(self) -> Any:
        __tracebackhide__ = True
        exec(self._code, self._names)
        return None if self._last is None else eval(self._last, self._names)

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
        return reached(_named(self.tree, self._names))

    def beyond_undo(self) -> list[str]:
        """The names of what the cell uses and nobody can put back: open files."""
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return sorted(name for name in used if isinstance(self._names.get(name), IOBase))

    def iterators(self) -> list[str]:
        """The names of iterators that the cell draws from: its next batch, say."""
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return sorted(
            name
            for name in used
            if isinstance(self._names.get(name), Iterator)
            and not isinstance(self._names[name], IOBase)
        )


class _Silence(TextIOBase):
    """Takes what is printed and keeps none of it: a step runs hundreds of times."""

    def write(self, text: str) -> int:
        return len(text)


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
