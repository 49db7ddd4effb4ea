"""Turn a notebook cell into a step to measure: compile it, and find its names and models."""

from __future__ import annotations

import ast
import builtins
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import IOBase
from types import CodeType
from typing import Any

import torch
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError

from speedkit_jupyter.notebook.namespace import find_models, named_optimizers
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.rounds.timing import Stopwatch
from speedkit_jupyter.state.handlers.names import Names, global_names, names_of
from speedkit_jupyter.step import reachable
from speedkit_jupyter.step.step import StateWarning, Step
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import StepError, did_you_mean
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.tracebacks import user_code_boundary

NO_MODEL = (
    "the cell uses no model that was there before: make it in an earlier cell, and name it with "
    "--model if SpeedKit can't find it"
)


class Cell:
    """The code of a cell, run repeatedly in the user's namespace.

    Raises SyntaxError for code that does not compile, and UsageError for an empty cell.
    """

    def __init__(self, shell: Any, source: str, line: str = "") -> None:
        self._shell, self.source = shell, source.strip()
        # Line 1 is the magic, so that line numbers match the notebook's.
        code = shell.transform_cell(f"# %%speedbench {line.strip()}".rstrip() + f"\n{source}")
        self._file = _cached(shell, code)
        parsed: ast.Module = shell.compile.ast_parse(code, self._file)
        self.tree: ast.Module = shell.transform_ast(parsed)
        if not self.tree.body:
            raise UsageError("the cell is empty: write the step to measure in it")
        body, last = list(self.tree.body), None
        if isinstance(body[-1], ast.Expr):
            last = ast.Expression(body.pop().value)  # type: ignore[attr-defined]
        self._code: CodeType = shell.compile(ast.Module(body, []), self._file, "exec")
        self._last = shell.compile(last, self._file, "eval") if last else None
        self._codes = [code for code in (self._code, self._last) if code is not None]
        self._names = shell.user_ns
        self._has_run = False
        self._block: ExitStack | None = None

    @user_code_boundary
    def run(self, context: SpeedContext | None = None) -> Any:
        """Run the cell, and return the value of its last expression, or None without one.

        The variable `ctx` gets `context`, if given. In `quiet` blocks, only the first run prints.
        """
        if context is not None:
            self._names["ctx"] = context
        try:
            exec(self._code, self._names)
            return None if self._last is None else eval(self._last, self._names)
        finally:
            if self._block is not None and not self._has_run:
                self._silence(self._block)
            self._has_run = True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Drop the output of runs in the block, except for the cell's first run."""
        with ExitStack() as self._block:
            self._block.callback(setattr, self, "_block", None)
            if self._has_run:
                self._silence(self._block)
            yield

    def _silence(self, block: ExitStack) -> None:
        """Drop output until the block ends."""
        sink = block.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        block.enter_context(redirect_stdout(sink))
        block.enter_context(redirect_stderr(sink))

    def loop(self) -> Callable[[int, Stopwatch], None]:
        """Return a function that runs the cell `loops` times, and times the loop with `watch`."""
        code = self._shell.compile(self.tree, self._file, "exec")
        names = self._names

        @user_code_boundary
        def run(loops: int, watch: Stopwatch) -> None:
            watch.begin()
            for _ in itertools.repeat(None, loops):
                exec(code, names)
            watch.end()

        return run

    def assigned(self) -> list[str]:
        """Return the global names that the code binds."""
        return sorted({name for code in self._codes for name in global_names(code).bound})

    def names(self) -> Names:
        """Return the names that the code reads and assigns, with their namespace."""
        return names_of(self._codes, self._names)

    def iterators(self) -> list[str]:
        """Return the names in the code whose values are iterators, except files."""
        values = {name: self._names.get(name) for name in sorted(self.names().all)}
        return [n for n, one in values.items() if is_a(one, Iterator) and not is_a(one, IOBase)]


def _cached(shell: Any, code: str) -> str:
    """Cache the code under a file name that tracebacks show as this cell; return that name."""
    # ipykernel's name for a cell is not a file, so some versions of IPython show wrong lines.
    numbers = getattr(shell.compile, "_filename_map", {})  # cell numbers by file name
    number = max(numbers.values(), default=shell.execution_count)
    name = str(CachingCompiler().cache(code, number))
    numbers[name] = number
    return name


# --- the step ---


def step_of_cell(shell: Any, cell: Cell, arguments: Any, quiet: bool = False) -> Step:
    """Return a cell's step, for the models and optimizers in the line if any; raises UsageError."""
    names = shell.user_ns
    objects = reachable.reached([cell.names()])
    found, optimizers = reachable.outermost(objects), reachable.optimizers_among(objects)
    if not found:  # frozen TorchScript modules have no parameters, so `outermost` skips them
        found = [one for one in objects if is_a(one, torch.jit.ScriptModule)]
    if arguments.model:
        named = [find_models(names, name) for name in arguments.model]
        found = [model for models in named for model in models.values()]
    if not found and (arguments.compare or arguments.tune):
        known = [*names, *dir(builtins), *cell.assigned()]
        missing = next((name for name in sorted(cell.names().all) if name not in known), None)
        hint = f"the name {missing!r} is not defined.{did_you_mean(missing, names)}"
        raise UsageError(NO_MODEL if missing is None else hint)
    if arguments.optimizer:
        optimizers = list(named_optimizers(names, arguments.optimizer).values())
    # In measured steps, the variant's context replaces a missing `ctx` or another model's context.
    # A measured model's own context stays in `ctx`, and follows the variant's plan.
    ctx = names.get("ctx")
    is_context = isinstance(ctx, SpeedContext) and all(ctx.model is not one for one in found)
    lends_context = "ctx" in cell.names().all and (ctx is None or is_context)

    return Step(
        cell.run if lends_context else lambda context: cell.run(),
        found,
        optimizers,
        reachable.bystanders_among(objects, [*found, *optimizers]),
        names=names,
        assigned=[*cell.assigned(), *(["ctx"] if lends_context else [])],
        others=[cell.names()],
        iterators=cell.iterators(),
        around_blocks=cell.quiet,
        say=messages.debug if quiet else _named,
    )


def _named(line: str) -> None:
    """Show a line as a StateWarning, which the user's filters may hide or make an error."""
    with warnings.catch_warnings(record=True) as shown:
        messages.warn(line, StateWarning)
    if shown:
        messages.important(line)


def again(shell: Any, cell: Cell, arguments: Any) -> Step:
    """Return a new step of the cell, with the current values of its names; raises StepError."""
    try:
        return step_of_cell(shell, cell, arguments, quiet=True)
    except UsageError as error:
        raise StepError(str(error)) from None
