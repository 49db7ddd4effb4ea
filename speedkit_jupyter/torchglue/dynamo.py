"""Use Dynamo's private names: settings, records of compilations, and compiler errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from speedkit_jupyter.torchglue.private import cached_functions, found

# Packages of torch.compile. If they are renamed, compiler errors count as the user's errors.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
DYNAMO_CONFIG = f"{COMPILERS[0]}.config"
# Modules whose import loads most of the compiler; each takes about half a second.
COMPILER_PARTS = (
    "sympy",
    f"{COMPILERS[0]}.utils",
    f"{COMPILERS[2]}.aot_autograd",
    f"{COMPILERS[1]}.lowering",
    f"{COMPILERS[1]}.compile_fx",
)

# Returns Dynamo's config module; the public `torch.compiler.config` has only some settings.
dynamo_config = partial(import_module, DYNAMO_CONFIG)
# Returns Dynamo's counters of this process.
compile_counters = partial(found, f"{COMPILERS[0]}.utils", "counters")


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile leave a function and its callees uncompiled, at no cost per call."""
    frames: Any = found("torch._C", "_dynamo").eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]


def import_compiler() -> None:
    """Import most of the compiler, so that the first compilation does not wait for the import."""
    for name in COMPILER_PARTS:
        import_module(name)


def is_dynamo_loaded() -> bool:
    """Return whether Dynamo is imported; without Dynamo, nothing was compiled."""
    return f"{COMPILERS[0]}.callback" in sys.modules


def _utils() -> Any:
    return sys.modules.get(f"{COMPILERS[0]}.utils")


def compilations() -> Sequence[Any]:
    """Return Dynamo's records of its latest compilations; empty if Dynamo is not loaded."""
    return _utils().get_compilation_metrics() if _utils() else ()


def guard_failures(first: str, graphs: int) -> list[str]:
    """Return up to `graphs` recorded guard failures, starting with `first`; else [first]."""
    for reasons in getattr(_utils(), "guard_failures", {}).values():
        if first in reasons:
            begin = len(reasons) - 1 - reasons[::-1].index(first)
            return list(reasons[begin : begin + graphs])
    return [first]


def graph_breaks() -> Sequence[Any]:
    """Return Dynamo's graph breaks (`reason`, `user_stack`); empty if Dynamo isn't loaded."""
    return _utils().graph_break_reasons if _utils() else ()


def eager_backward() -> tuple[Any, dict[str, bool]]:
    """Return functorch's config, and settings that compile the backward with the forward pass."""
    # By default, torch compiles a backward pass when it first runs. Without donated buffers,
    # backward() can retain the graph. If torch lacks a setting (not 2.11, 2.13), the dict is empty.
    config = import_module(f"{COMPILERS[2]}.config")
    settings = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    return config, settings if all(hasattr(config, name) for name in settings) else {}


def without_guards() -> AbstractContextManager[object]:
    """Return a context manager in which compiled code checks only the guards that select a graph.

    The caller must ensure that no guarded value has changed since a call with all guards. If
    another stance is set, or torch lacks `skip_guard_eval_unsafe`, all guards are checked.
    """
    stance = getattr(sys.modules.get(f"{COMPILERS[0]}.eval_frame"), "_stance", None)
    is_usual = getattr(stance, "stance", "") == "default" and getattr(stance, "backend", 1) is None
    if not is_usual or not hasattr(stance, "skip_guard_eval_unsafe"):
        return nullcontext()
    set_stance: Any = import_module("torch.compiler").set_stance
    return set_stance("default", skip_guard_eval_unsafe=True)  # type: ignore[no-any-return]


def on_compiling(start: Callable[[Any], None], end: Callable[[Any], None]) -> Callable[[], None]:
    """Register compilation hooks until torch.compiler.reset(); return a function to remove them."""
    handler = found(f"{COMPILERS[0]}.callback", "callback_handler")
    handler.register_start_callback(start)
    handler.register_end_callback(end)

    def remove() -> None:
        if start in handler.start_callbacks:
            handler.remove_start_callback(start)
            handler.remove_end_callback(end)

    return remove


def override_caches() -> list[Any]:
    """Return the loaded functions of torch that cache tables of overridable functions."""
    # A table that is filled while torch is patched keeps the patches. Filling takes seconds.
    modules = map(sys.modules.get, ("torch.overrides", f"{COMPILERS[0]}.trace_rules"))
    return [one for module in modules if module for one in cached_functions(module)]


# Compiler errors are recognized by classes and attributes. If torch renames these, an error counts
# as the user's, or keeps torch's wording.


def is_compiler_error(error: BaseException) -> bool:
    """Return whether an error is from torch.compile, or from double backward in compiled code."""
    is_second = "double backward" in str(error)
    return is_second or any(base.__module__.startswith(COMPILERS) for base in type(error).__mro__)


def cause(error: BaseException) -> BaseException:
    """Return an error's root cause; for a failed C++ build, its first error as a RuntimeError."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    printed = getattr(error, "output", None) or b""
    lines = printed.decode(errors="replace").splitlines() if isinstance(printed, bytes) else []
    said = next((line for line in lines if "error:" in line or "failed:" in line), None)
    return error if said is None else RuntimeError(said.strip())


def users_lines(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line number of each user frame in a compiler error, innermost first."""
    stack = getattr(error, "real_stack", None) or ()
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def lacks_compiler(error: BaseException) -> bool:
    """Return whether an error is about a missing C++ compiler or Triton, or about a too old GPU."""
    names = {"InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton"}
    return type(cause(error)).__name__ in names
