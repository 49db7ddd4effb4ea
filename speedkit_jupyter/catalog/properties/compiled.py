"""What a compiled module calls: compiled code, and the plain model where that can't be made."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter.catalog.properties.background_compile import Beside
from speedkit_jupyter.catalog.properties.calls import Call, graph_of
from speedkit_jupyter.catalog.properties.eager_parts import EagerParts
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.source_lines import Spot, place
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.torchglue import dynamo as torch_private
from speedkit_jupyter.torchglue.inductor import forget_builds
from speedkit_jupyter.torchglue.modules import plain_call
from speedkit_jupyter.torchglue.private import current_node, is_transforming, tree_leaves

# Graphs that one plan may compile: 8 is torch's own limit, for a function that serves one module.
GRAPHS, NUMBERS = 8, itertools.count()
# The node of a gradient that compiled code has computed, and can't differentiate.
SECOND = "CompiledFunctionBackwardBackward"
BESIDE = "runs as before while another process compiles it"
COMPILED_BESIDE = "compiled by another process while it ran as before"
HALF_WRITTEN = r"(\S+\.so): (file too short|invalid ELF header|file is truncated)"


class CompiledCode:
    """Compiled forward passes of one plan, plain ones once that failed. It holds no module.

    `forwards` are the functions that were compiled, with those of all parts.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        modules: Sequence[torch.nn.Module],
        notes: dict[str, str],
        required: bool = False,
        beside: bool = False,
    ) -> None:
        self._options, self._modules, self.failed = options, len(modules), False
        self._beside, self._first = Beside(options) if beside else None, 0
        self._compiled = _compile(options, len(modules), self._beside)
        self.parts, self.forwards = EagerParts(Alive(modules)), set[Any]()
        self._notes, self._required, backend = notes, required, options.get("backend")
        self._name = f"torch.compile by {backend}" if backend else "torch.compile"
        self._checked, self._at, self._why = False, "", ""

    def run(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Make one forward pass. A failing compiler never stops it; the user's own errors do."""
        if is_transforming():  # Dynamo would leave its code uncompiled for good
            return call.below(*args, **kwargs)
        if self._beside is not None:
            self._look_beside(self._beside, call.module)
        if self.failed or (self._beside is not None and self._beside.is_waiting):
            return call.below(*args, **kwargs)
        try:
            graphs = None if self._checked else _graphs()
            recomputes = getattr(call.inner, "recomputes", False)
            result = self._compiled(call.module, args, kwargs, recomputes)
            if not self._checked:
                if any(node.name() == SECOND for node in graph_of(tree_leaves(result))):
                    raise RuntimeError(
                        "compiled code has no double backward, and the model needs it"
                    )
                self._check(graphs)
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
            if removed_half_written_build(error):
                return self.run(call, args, kwargs)
            if self._required:
                raise
            return self._run_plainly(error, call, args, kwargs)

    def _look_beside(self, beside: Beside, module: torch.nn.Module) -> None:
        """Start the other process before the second step, and take over once it is done."""
        if current_node() is not None:  # a checkpoint recomputes as it was
            return
        if not self._first:
            self._notes["compile"] = BESIDE
        elif self._first == id(module) and not beside.is_waiting and not beside.why_not:
            beside.begin()
        elif self._first == id(module) and beside.is_done():
            self._beside, self._checked = None, False
            self._compiled = _compile(self._options, self._modules)
            failed = f"compiled here, since compiling beside the loop failed: {beside.why_not}"
            self._notes["compile"] = failed if beside.why_not else COMPILED_BESIDE
        self._first = self._first or id(module)

    def end(self) -> None:
        """Compile nothing any more in another process."""
        if self._beside is not None:
            self._beside.end()

    def _check(self, graphs: int | None) -> None:
        """Note what was compiled, and try whether more of it can be."""
        self.forwards = {type(part).forward for part in self.parts.every()}
        if _graphs() == graphs:
            self._notes["compile"] = f"{self._name} found nothing to compile in this model"
        self._checked = not self.parts.narrow()
        if self._checked and self.parts.names:
            self._notes["compile"] = self._partly
        elif not self._checked:
            self._compiled = _compile(self._options, self._modules)

    def _run_plainly(self, error: Exception, call: Call, args: Any, kwargs: Any) -> Any:
        # Where the plain model fails too, the mistake is the user's: the plain error goes up.
        result = call.below(*args, **kwargs)
        line, self._why = None, in_a_line(torch_private.cause(error))
        if not (self._options.get("fullgraph") or torch_private.lacks_compiler(error)):
            line = self.parts.blame(Spot(*one) for one in torch_private.users_lines(error))
            self.failed = line is None and not self.parts.try_next()
        else:
            self.failed = True
        self._compiled, self._checked = _compile(self._options, self._modules), False
        self._beside = None
        self._at = f" ({place(line)})" if line else self._at
        whole = f"{self._name} failed, so the model runs as before: {self._why}"
        note = self._partly if line else whole
        is_new = "compile" not in self._notes or line is not None
        self._notes["compile"] = note
        if is_new:
            messages.warn(f"{note} (%speedkit report)")
        return result

    @property
    def _partly(self) -> str:
        left = f"{self.parts.names}{self._at} can't be compiled and runs as before"
        return f"{left}; the rest is compiled: {self._why}"


class CompiledCall(Call):
    """The call of one module by compiled code."""

    compiles = True

    def __init__(self, module: torch.nn.Module, code: CompiledCode) -> None:
        super().__init__(module)
        self.code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one forward pass; a plain one where something around it is being compiled."""
        if torch.compiler.is_compiling():
            return plain_call(self.module)(*args, **kwargs)
        return self.code.run(self, args, kwargs)


def _compile(
    options: Mapping[str, Any], modules: int, beside: Beside | None = None
) -> Callable[..., Any]:
    """Compile a function of ours: `nn.Module.compile()` skips torch.nn's own classes. Modules that
    are alike share what is compiled; those that are not need room for a graph each. For what is
    compiled `beside`, graphs are traced only.
    """

    def forward(module: torch.nn.Module, args: Any, kwargs: Any, recomputes: bool) -> Any:
        if recomputes:
            return checkpoint(plain_call(module), *args, use_reentrant=False, **kwargs)
        return plain_call(module)(*args, **kwargs)

    # torch keeps its knowledge of changing sizes by a function's name; models must not share it.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(NUMBERS)}")
    more: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters and modules > 1:
        more["recompile_limit"] = GRAPHS * modules
    if beside is not None:
        options = {name: options[name] for name in options if name != "mode"}
        options["backend"] = beside.trace
    return compile_alone(forward, **options, **more)


def compile_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a Python function with a cache that no other compiled function shares."""
    if "isolate_recompiles" in signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    else:  # torch keeps one cache for each code object
        code, names = function.__code__.replace(), function.__globals__
        function = types.FunctionType(code, names, closure=function.__closure__)
    compiled: Callable[..., Any] = torch.compile(function, **options)
    return compiled


def _graphs() -> int:
    return int(torch_private.compile_counters()["stats"]["unique_graphs"])


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether the compiler died of Ctrl-C: Jupyter signals the whole process group."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "returncode", 0) in (-2, 130):
            return True
        error = error.__cause__ or error.__context__
    return False


def removed_half_written_build(error: BaseException) -> bool:
    """Delete the library that a killed linker left half written: Inductor takes any file of that
    name for a finished one, also in later processes.
    """
    match = re.search(HALF_WRITTEN, str(error))
    if match is None or not Path(match[1]).is_file():
        return False
    Path(match[1]).unlink()
    forget_builds()
    return True
