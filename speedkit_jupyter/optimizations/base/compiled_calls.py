"""What the call of a compiled module runs, and how a build that was killed is mended."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.support import torch_private

if TYPE_CHECKING:
    import torch

# Graphs that one plan may compile: 8 is torch's own limit, for a function that serves one module.
GRAPHS = 8
HALF_WRITTEN = r"(\S+\.so): (file too short|invalid ELF header|file is truncated)"


class CompiledCode:
    """Compiled forward passes of one plan, shared by its modules; plain ones once that failed.

    It holds none of the modules: what is kept of compiled code must not keep the model.
    """

    def __init__(self, options: Mapping[str, Any], modules: int, notes: dict[str, str]) -> None:
        self._compiled, self.failed = _compile(options, modules), False
        self._notes, backend = notes, options.get("backend")
        self._name = f"torch.compile by {backend}" if backend else "torch.compile"
        self._checked = False

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Make one forward pass. A failing compiler never stops it; the user's own errors do."""
        if self.failed:
            return module._call_impl(*args, **kwargs)
        try:
            if self._checked:
                return self._compiled(module, args, kwargs)
            return self._first_run(module, args, kwargs)
        except KeyboardInterrupt:
            torch_private.forget_builds()
            raise
        except Exception as error:
            if not torch_private.is_compiler_error(error):
                raise
            if was_interrupted(error):
                torch_private.forget_builds()
                raise KeyboardInterrupt from error
            if removed_half_written_build(error):
                return self.run(module, args, kwargs)
            return self._run_plainly(error, module, args, kwargs)

    def _first_run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        counters = torch_private.compile_counters()
        before = counters["stats"]["unique_graphs"]
        result = self._compiled(module, args, kwargs)
        self._checked = True
        if counters["stats"]["unique_graphs"] == before:
            self._notes["compile"] = f"{self._name} found nothing to compile in this model"
        return result

    def _run_plainly(
        self, error: Exception, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        # Where the plain model fails too, the mistake is the user's: the plain error goes up.
        result = module._call_impl(*args, **kwargs)
        self.failed = True
        note = f"{self._name} failed, so the model runs as before: {_first_line(error)}"
        self._notes["compile"] = note
        warnings.warn(f"{note} (%speedkit report)", stacklevel=4)
        return result


class CompiledCall(Call):
    """What the call of one module runs."""

    compiles = True

    def __init__(self, module: torch.nn.Module, code: CompiledCode) -> None:
        super().__init__(module)
        self.code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one forward pass; a plain one where something around it is being compiled."""
        import torch

        if torch.compiler.is_compiling():
            return self.module._call_impl(*args, **kwargs)
        return self.code.run(self.module, args, kwargs)


def _compile(options: Mapping[str, Any], modules: int) -> Callable[..., Any]:
    """Compile a function of ours: `nn.Module.compile()` skips torch.nn's own classes.

    The module is an argument, so that modules that are alike share what is compiled; those that
    are not (each with a number of its own, say) need room for a graph each.
    """
    import torch

    def forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    allowed = signature(torch.compile).parameters
    more: dict[str, Any] = {}
    if "recompile_limit" in allowed and modules > 1:
        more["recompile_limit"] = GRAPHS * modules
    if "isolate_recompiles" in allowed:
        more["isolate_recompiles"] = True
    else:  # several plans on one model: each needs a code object, and so a cache, of its own
        forward = types.FunctionType(
            forward.__code__.replace(), forward.__globals__, closure=forward.__closure__
        )
    return torch.compile(forward, **options, **more)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


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
    torch_private.forget_builds()
    return True
