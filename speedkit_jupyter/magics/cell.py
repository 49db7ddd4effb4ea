"""A cell as a step: its code compiled once, and what it reads and assigns."""

from __future__ import annotations

import ast
import builtins
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import IOBase
from types import FrameType
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError

from speedkit_jupyter.magics.cell_output import CellOutput
from speedkit_jupyter.measure.rounds.clock import Stopwatch
from speedkit_jupyter.measure.undo.handlers.names import Names
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.tracebacks import door

Rewrite = Callable[[ast.Module], ast.Module]
MAGIC = "# %%speedbench"
# What IPython makes of a line or a cell magic.
MAGICS = {"run_line_magic": "%", "run_cell_magic": "%%"}
# What the code of a plain cell is called, by the version of IPython.
OF_A_CELL = ("<module>", "<cell line")
# What Python and IPython raise for text that can't be code, beside SyntaxError.
NO_CODE = (ValueError, OverflowError, RecursionError, MemoryError)
# Its first line is line 1, as a module's is: what shows a traceback counts from there.
LOOP = """def {loop}({steps}, {begin}, {end}):
    {begin}()
    for {step} in {steps}:
        pass
    {end}()
"""


class Cell:
    """The code of a cell: run it again and again in the user's namespace.

    `line` is what stands behind `%%speedbench`; what runs is what `rewrite` makes of the code.
    `file` is what Python calls it, where it was read before.
    Raises SyntaxError for code that does not compile, UsageError for what can't be measured.
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
        transformed = _numbered(shell, source, self._line)
        self._file = name = file or _cached(shell, transformed)
        with _refused_in_one_line():
            self.tree: ast.Module = shell.transform_ast(shell.compile.ast_parse(transformed, name))
            if not self.tree.body:
                raise UsageError("%%speedbench: the cell is empty: write the step to measure in it")
            _refuse_await(self.tree)
            runs = rewrite(copy.deepcopy(self.tree)) if rewrite else self.tree
            body, last = list(runs.body), None
            if isinstance(body[-1], ast.Expr):
                last = ast.Expression(body.pop().value)  # type: ignore[attr-defined]
            self._code = shell.compile(ast.Module(body, []), name, "exec")
            self._last = shell.compile(last, name, "eval") if last else None
        self._before = ast.Module([], [])
        self._names = shell.user_ns
        self._output = CellOutput()

    def rewritten(self, rewrite: Rewrite) -> Cell:
        """Return the same cell; what runs of it is what `rewrite` makes of its code."""
        return Cell(self._shell, self._source, self._line, rewrite, self._file)

    @door
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

    def begin_with(self, setup: str) -> None:
        """Have a loop run this code first; raises SyntaxError, UsageError."""
        shell, code = self._shell, self._shell.transform_cell(setup)
        with _refused_in_one_line():
            try:
                self._before = shell.transform_ast(shell.compile.ast_parse(code, self._file))
                _refuse_await(self._before)
                # No `return`, which would end the loop.
                shell.compile(self._before, self._file, "exec")
            except SyntaxError as error:  # it points to where the code stands behind the magic
                begin = len(f"{MAGIC} {self._line}") - len(setup)
                if error.lineno == 1:
                    error.offset = error.offset and error.offset + begin
                    error.end_offset = error.end_offset and error.end_offset + begin
                raise

    def loop(self) -> tuple[Callable[[int, Stopwatch], None], float]:
        """Return a loop over the cell with its set-up before it, as `%%timeit` has it, and how long
        Python took to compile it in seconds.

        The cell's lines stand in the loop itself, so that a step of nanoseconds can be timed. What
        they assign is local to it, but for what they also read of the notebook's names (`total +=
        loss`, which `%%timeit` refuses). Raises SyntaxError.
        """
        __tracebackhide__ = True
        ours = _free_names(self.tree, self._before)
        tree = ast.parse(LOOP.format(**ours))
        inner = tree.body[0]
        assert isinstance(inner, ast.FunctionDef)
        inner.body[0:0] = [*self._of_the_notebook(), *self._before.body]
        loop = next(node for node in inner.body if isinstance(node, ast.For))
        loop.body = self.tree.body
        start = time.perf_counter()
        code = self._shell.compile(ast.fix_missing_locations(tree), self._file, "exec")
        took_s = time.perf_counter() - start
        space: dict[str, Any] = {}
        exec(code, self._names, space)
        inner_loop = space[ours["loop"]]
        changed = {"co_name": "<module>"}
        if sys.version_info >= (3, 11):
            changed["co_qualname"] = "<module>"
        inner_loop.__code__ = inner_loop.__code__.replace(**changed)  # as tracebacks call a cell

        @door
        def run(loops: int, watch: Stopwatch) -> None:
            __tracebackhide__ = True
            inner_loop(itertools.repeat(None, loops), watch.begin, watch.end)

        return run, took_s

    def _of_the_notebook(self) -> list[ast.Global]:
        changed = {
            node.target.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }
        read = changed | _ids(self.tree, ast.Load)
        names = (read & _ids(self.tree, ast.Store)) - _ids(self._before, ast.Store)
        kept = sorted(name for name in names if name in self._names)
        return [ast.Global(kept)] if kept else []

    def assigned(self) -> list[str]:
        """Return the names that the cell binds or deletes."""
        bound = _ids(self.tree, ast.Store) | _ids(self.tree, ast.Del)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update((a.asname or a.name).partition(".")[0] for a in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
        return sorted(bound)

    def magic(self) -> str:
        """Return the first magic that the cell calls, as `%time`: its line is text to Python."""
        for node in ast.walk(self.tree):
            called = node.func if isinstance(node, ast.Call) else None
            kind = MAGICS.get(called.attr) if isinstance(called, ast.Attribute) else None
            if kind and isinstance(node, ast.Call) and node.args:
                return f"{kind}{getattr(node.args[0], 'value', '')!s}"
        return ""

    def undefined(self) -> list[str]:
        """Return the names that the cell reads and that mean nothing, in the order of the code."""
        names = {*self._names, *dir(builtins), *self.assigned()}
        names |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        used = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        used.sort(key=lambda node: (node.lineno, node.col_offset))
        return [node.id for node in used if node.id not in names]

    def reads(self, name: str) -> bool:
        """Whether the cell's own code uses a name."""
        return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(self.tree))

    def names(self) -> Names:
        """Return every name that the code uses, set-up and all: it reaches the rest from there."""
        declared = [n for n in ast.walk(self._before) if isinstance(n, ast.Global)]
        bound = (name for node in declared for name in node.names)
        return Names(self._names, self._used(), bound)

    def _used(self) -> set[str]:
        nodes = (node for tree in (self._before, self.tree) for node in ast.walk(tree))
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    def iterators(self) -> list[str]:
        """Return the names of iterators that the code draws from: its next batch, say."""
        return sorted(
            name
            for name in self._used()
            if is_a(self._names.get(name), Iterator) and not is_a(self._names[name], IOBase)
        )


def _numbered(shell: Any, source: str, line: str) -> str:
    """The cell as Python, with the magic as its first line and every line at its place.

    IPython drops empty lines at the beginning of what it transforms.
    """
    dropped = _empty(source)
    try:
        code: str = shell.transform_cell(source)
    except SyntaxError as error:  # a line that fits no indentation
        error.lineno = error.lineno and error.lineno + 1 + dropped
        raise
    return f"{MAGIC} {line}".rstrip() + "\n" * (1 + dropped - _empty(code)) + code


def _empty(text: str) -> int:
    """The number of empty lines that it begins with."""
    lines = text.splitlines()
    return next((count for count, line in enumerate(lines) if line.strip()), len(lines))


def _cached(shell: Any, code: str) -> str:
    """A name under which tracebacks find the lines, and the number of the cell that runs now.

    As a shell in a terminal names cells: a kernel's name is that of a file which isn't there, and
    of those some versions of IPython show the wrong lines.
    """
    # A newer IPython has counted on while a cell runs, and knows by which name each was compiled;
    # in older ones, which don't, the count is the cell's.
    numbers, number = getattr(shell.compile, "_filename_map", {}), shell.execution_count
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name.startswith(OF_A_CELL) and frame.f_code.co_filename in numbers:
            number = numbers[frame.f_code.co_filename]
            break
        frame = frame.f_back
    name = str(CachingCompiler().cache(code, number))
    numbers[name] = number
    return name


@contextmanager
def _refused_in_one_line() -> Iterator[None]:
    """What can't be compiled for another reason than its syntax: null bytes, brackets too deep."""
    try:
        yield
    except SyntaxError:
        raise
    except NO_CODE as error:
        raise UsageError(f"%%speedbench: the cell can't be compiled: {error}") from None


def _refuse_await(tree: ast.AST) -> None:
    """A thread of its own, which `await` would need, has no autocast and outlives Ctrl-C."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) or (
            isinstance(node, ast.comprehension) and node.is_async
        ):
            raise UsageError("%%speedbench: a step with top-level await can't be measured")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _ids(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The plain names that the code loads, stores or deletes."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _free_names(*trees: ast.AST) -> dict[str, str]:
    """Names for the loop that the code does not use in any way."""
    used = {
        value
        for tree in trees
        for node in ast.walk(tree)
        for _, field in ast.iter_fields(node)
        for value in (field if isinstance(field, list) else [field])
        if isinstance(value, str)
    }
    names = {}
    for name in ("loop", "steps", "begin", "end", "step"):
        names[name] = f"_speedbench_{name}"
        while names[name] in used:
            names[name] += "_"
    return names
