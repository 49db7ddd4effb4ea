"""Compiled calls of modules, and the fallback to uncompiled calls if compiling fails."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter.catalog.model_changes.background_compile import SubprocessCompiler
from speedkit_jupyter.catalog.model_changes.calls import Call, graph_of
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.source_lines import Spot, is_users, place
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.torchglue import dynamo as torch_private
from speedkit_jupyter.torchglue.inductor import forget_builds
from speedkit_jupyter.torchglue.modules import plain_call
from speedkit_jupyter.torchglue.private import current_node, is_transforming, tree_leaves

# Limit on graphs per module. torch's limit is per function, and all modules share one function.
GRAPHS, NUMBERS = 8, itertools.count()
# Name of the autograd node behind gradients of compiled code, which has no double backward.
SECOND = "CompiledFunctionBackwardBackward"
WAITING = "runs as before while another process compiles it"
TAKEN_OVER = "compiled by another process while it ran as before"


class CompiledCode:
    """Run a plan's forward passes compiled; after a failure, run them uncompiled."""

    def __init__(
        self,
        options: Mapping[str, Any],
        modules: Sequence[torch.nn.Module],
        notes: dict[str, str],
        required: bool = False,
        background: bool = False,
        entry: str = "compile",
    ) -> None:
        self._options, self.modules = options, Alive(modules)
        self._background, self._first = SubprocessCompiler(options) if background else None, 0
        self._compiled = _compile(options, len(modules), self._background)
        self._notes, self._required, backend = notes, required, options.get("backend")
        self._entry = entry  # key in `notes`
        self._name = f"torch.compile by {backend}" if backend else "torch.compile"
        self.failed = self._checked = False
        self.forwards: set[Any] = set()  # the `forward` functions of the classes of all parts

    def run(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Return the call's result, compiled if possible; if `required`, raise compiler errors."""
        if is_transforming():  # else Dynamo would leave the code uncompiled permanently
            return call.below(*args, **kwargs)
        if self._background is not None:
            self._check_background(self._background, call.module)
        if self.failed or (self._background is not None and self._background.is_waiting):
            return call.below(*args, **kwargs)
        try:
            graphs = None if self._checked else _graphs()
            recomputes = getattr(call.inner, "recomputes", False)
            result = self._compiled(call.module, args, kwargs, recomputes)
            if not self._checked:
                self._check(result, graphs)
            return result
        except KeyboardInterrupt:
            forget_builds()
            raise
        except Exception as error:
            if not torch_private.is_compiler_error(error):
                raise
            if was_interrupted(error):
                forget_builds()
                raise KeyboardInterrupt from error
            if self._required:
                raise
            return self._run_plainly(error, call, args, kwargs)

    def _check_background(self, other: SubprocessCompiler, module: torch.nn.Module) -> None:
        """Start the child process at the first module's second call; compile once it ends."""
        if current_node() is not None:  # a recomputation must run as its forward pass did
            return
        if not self._first:
            self._notes[self._entry], self._first = WAITING, id(module)
        elif self._first == id(module) and not other.is_waiting and not other.why_not:
            other.begin()
        elif self._first == id(module) and other.is_done():
            self._background, self._checked = None, False
            self._compiled = _compile(self._options, len(self.modules))
            failed = f"compiled here, since the other process failed: {other.why_not}"
            self._notes[self._entry] = failed if other.why_not else TAKEN_OVER

    @property
    def background(self) -> SubprocessCompiler | None:
        """Return the compiler in a child process; None without one, or once its work is done."""
        return self._background

    def end(self) -> None:
        """Stop the child process, if any."""
        if self._background is not None:
            self._background.end()

    def _check(self, result: Any, graphs: int | None) -> None:
        """Set `forwards`; note if nothing was compiled. Raises RuntimeError on double backward."""
        if any(node.name() == SECOND for node in graph_of(tree_leaves(result))):
            raise RuntimeError("compiled code has no double backward, and the model needs it")
        parts = (part for module in self.modules for part in module.modules())
        self.forwards, self._checked = {type(part).forward for part in parts}, True
        if _graphs() == graphs:
            self._notes[self._entry] = f"{self._name} found nothing to compile in this model"

    def _run_plainly(self, error: Exception, call: Call, args: Any, kwargs: Any) -> Any:
        # If the uncompiled model fails too, the user's error is raised.
        result = call.below(*args, **kwargs)
        self.failed, self._background = True, None
        note = f"{self._name} failed, so the model runs as before"
        lines = [Spot(*one) for one in torch_private.users_lines(error) if is_users(one[0])]
        is_whole = self._options.get("fullgraph") or torch_private.lacks_compiler(error)
        if lines and not is_whole:
            remedy = "with @torch.compiler.disable on its function the rest is compiled"
            note = f"{note} ({place(lines[0])}: {remedy})"
        note = f"{note}: {in_a_line(torch_private.cause(error))}"
        self._notes[self._entry] = note
        messages.warn(f"{note} (%speedkit report)")
        return result


class CompiledCall(Call):
    """The compiled call of one module."""

    compiles = True

    def __init__(self, module: torch.nn.Module, code: CompiledCode) -> None:
        super().__init__(module)
        self.code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the call's result; if the user compiles surrounding code, trace the plain call."""
        if torch.compiler.is_compiling():
            return plain_call(self.module)(*args, **kwargs)
        return self.code.run(self, args, kwargs)


def _compile(
    options: Mapping[str, Any], modules: int, background: SubprocessCompiler | None = None
) -> Callable[..., Any]:
    """Return a compiled function that calls a module. `Module.compile()` skips torch's modules.

    Modules of equal structure share compiled code. With `background`, graphs run uncompiled.
    """

    def forward(module: torch.nn.Module, args: Any, kwargs: Any, recomputes: bool) -> Any:
        if recomputes:
            return checkpoint(plain_call(module), *args, use_reentrant=False, **kwargs)
        return plain_call(module)(*args, **kwargs)

    # torch remembers changing sizes by function name, so each model needs its own name.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(NUMBERS)}")
    more: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters and modules > 1:
        more["recompile_limit"] = GRAPHS * modules
    if background is not None:
        options = {name: options[name] for name in options if name not in ("mode", "options")}
        options["backend"] = background.trace
    return compile_alone(forward, **options, **more)


def compile_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a compiled Python function with its own cache of graphs."""
    if "isolate_recompiles" in signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    else:  # torch has one cache per code object
        code, names = function.__code__.replace(), function.__globals__
        function = types.FunctionType(code, names, closure=function.__closure__)
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


def _graphs() -> int:
    return int(torch_private.compile_counters()["stats"]["unique_graphs"])


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C ended the compiler: Jupyter signals the whole process group."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "returncode", 0) in (-2, 130):
            return True
        error = error.__cause__ or error.__context__
    return False
