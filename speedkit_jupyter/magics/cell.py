"""A cell as a step: its code compiled once, and what it reads and assigns."""

from __future__ import annotations

import ast
import builtins
import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from io import IOBase, TextIOBase
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError

from speedkit_jupyter.measure.rounds.clock import Stopwatch
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.tracebacks import user_code_boundary

Rewrite = Callable[[ast.Module], ast.Module]


class Cell:
    """The code of a cell: run it again and again in the user's namespace.

    `line` is what stands behind `%%speedbench`; what runs is what `rewrite` makes of the code.
    `file` is what Python calls it, where it was read before.
    Raises SyntaxError for code that does not compile, UsageError for an empty cell.
    """

    def __init__(
        self,
        shell: Any,
        source: str,
        line: str = "",
        rewrite: Rewrite | None = None,
        file: str = "",
    ) -> None:
        __tracebackhide__ = True
        self._shell, self._source, self._line = shell, source, line.strip()
        # The magic is line 1, as in the notebook.
        code = shell.transform_cell(f"# %%speedbench {self._line}".rstrip() + f"\n{source}")
        self._file = file or _cached(shell, code)
        self.tree: ast.Module = self._parsed(code)
        if not self.tree.body:
            raise UsageError("the cell is empty: write the step to measure in it")
        runs = rewrite(copy.deepcopy(self.tree)) if rewrite else self.tree
        body, last = list(runs.body), None
        if isinstance(body[-1], ast.Expr):
            last = ast.Expression(body.pop().value)  # type: ignore[attr-defined]
        self._code = shell.compile(ast.Module(body, []), self._file, "exec")
        self._last = shell.compile(last, self._file, "eval") if last else None
        self._setup = ast.Module([], [])
        self._names = shell.user_ns
        self._output = _Output()

    def _parsed(self, code: str) -> ast.Module:
        tree: ast.Module = self._shell.compile.ast_parse(code, self._file)
        return self._shell.transform_ast(tree)  # type: ignore[no-any-return]

    def rewritten(self, rewrite: Rewrite) -> Cell:
        """Return the same cell; what runs of it is what `rewrite` makes of its code."""
        return Cell(self._shell, self._source, self._line, rewrite, self._file)

    @user_code_boundary
    def run(self) -> Any:
        """Run one step; return the value of a trailing expression. Only the first one may print."""
        __tracebackhide__ = True
        try:
            exec(self._code, self._names)
            return None if self._last is None else eval(self._last, self._names)
        finally:
            self._output.begun()

    def quiet(self) -> AbstractContextManager[None]:
        """Drop what a block of steps prints and logs, but for the first step of all."""
        return self._output.once()

    def loop(self, setup: str) -> Callable[[int, Stopwatch], None]:
        """Return a loop over the cell with this code before it, as `%%timeit` has it.

        Raises SyntaxError.
        """
        __tracebackhide__ = True
        self._setup = self._parsed(self._shell.transform_cell(setup))
        before = self._shell.compile(self._setup, self._file, "exec")
        code = self._shell.compile(self.tree, self._file, "exec")
        names = self._names

        @user_code_boundary
        def run(loops: int, watch: Stopwatch) -> None:
            __tracebackhide__ = True
            exec(before, names)
            watch.begin()
            for _ in itertools.repeat(None, loops):
                exec(code, names)
            watch.end()

        return run

    def assigned(self) -> list[str]:
        """Return the names that the cell binds or deletes."""
        return sorted(_bound(self.tree))

    def undefined(self) -> list[str]:
        """Return the names that the cell reads and that mean nothing."""
        names = {*self._names, *dir(builtins), *self.assigned()}
        names |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        return sorted(_ids(self.tree, ast.Load) - names)

    def reads(self, name: str) -> bool:
        """Whether the cell's own code uses a name."""
        return name in _ids(self.tree, ast.expr_context)

    def names(self) -> Names:
        """Return every name that the code uses, set-up and all: it reaches the rest from there."""
        return Names(self._names, self._used(), _bound(self._setup))

    def _used(self) -> set[str]:
        return _ids(self._setup, ast.expr_context) | _ids(self.tree, ast.expr_context)

    def iterators(self) -> list[str]:
        """Return the names of iterators that the code draws from: its next batch, say."""
        values = {name: self._names.get(name) for name in sorted(self._used())}
        return [n for n, one in values.items() if is_a(one, Iterator) and not is_a(one, IOBase)]


class _Output:
    """What a cell prints and logs: of hundreds of steps that of the first, until it has `begun`."""

    def __init__(self) -> None:
        self._is_silent = False

    def begun(self) -> None:
        """Note that the first step of all has ended."""
        self._is_silent = True

    def _passes(self, record: object = None) -> bool:
        return not self._is_silent

    @contextmanager
    def once(self) -> Iterator[None]:
        """Drop what a block of steps prints and logs, but for the first step of all."""
        # Handlers that took the notebook's stdout or stderr when they were made, as libraries' do.
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
        handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
        with ExitStack() as stack:
            for handler in handlers:
                if getattr(handler, "stream", None) in streams:
                    stack.callback(handler.removeFilter, self._passes)
                    handler.addFilter(self._passes)
            stack.enter_context(redirect_stdout(_Stream(self._passes, sys.stdout)))
            stack.enter_context(redirect_stderr(_Stream(self._passes, sys.stderr)))
            yield


class _Stream(TextIOBase):
    """Writes to another stream as long as text `passes`."""

    def __init__(self, passes: Any, stream: Any) -> None:
        self._passes, self._stream = passes, stream

    def write(self, text: str) -> int:
        return int(self._stream.write(text) or len(text)) if self._passes() else len(text)

    def flush(self) -> None:
        if self._passes():
            self._stream.flush()


def _bound(tree: ast.AST) -> set[str]:
    bound = _ids(tree, ast.Store, ast.Del)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((a.asname or a.name).partition(".")[0] for a in node.names)
    return bound


def _cached(shell: Any, code: str) -> str:
    """A name under which tracebacks find the lines, with the number of the cell that runs now.

    It is as a shell in a terminal names cells: a kernel's name is that of a file which isn't
    there, and of those some versions of IPython show the wrong lines.
    """
    numbers = getattr(shell.compile, "_filename_map", {})  # of each cell, by its name
    number = max(numbers.values(), default=shell.execution_count)
    name = str(CachingCompiler().cache(code, number))
    numbers[name] = number
    return name


def _ids(tree: ast.AST, *contexts: type[ast.expr_context]) -> set[str]:
    """The plain names that the code loads, stores or deletes."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, contexts)}
