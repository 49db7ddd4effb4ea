"""`check()`: verify that a rewritten function is correct, and measure its speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import GRADIENT, PatchWatch, Side
from speedkit_jupyter.extras.check.inputs import InputSource
from speedkit_jupyter.extras.check.result import Check, SizeCheck
from speedkit_jupyter.extras.check.rewrite_judge import RewriteJudge
from speedkit_jupyter.rounds.comparison import environment
from speedkit_jupyter.state import measurement_guard
from speedkit_jupyter.state.snapshot import generators_kept
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# Shapes (batch, heads, length, head_dim) by name: one row, an odd length, a shape of real models.
SIZES: dict[str, Any] = {
    "single": (1, 1, 1, 16),
    "small": (1, 2, 16, 16),
    "odd": (2, 3, 37, 24),
    "realistic": (2, 8, 512, 64),
}
CHECK_BUDGET_S = 30.0  # default budget in seconds
OTHER_WEIGHTS = (
    "the names of parameters differ: each keeps its own weights, whose gradients are not compared"
)


@hide_internal_frames
def check(
    candidate: Callable[..., Any] | str,
    reference: Callable[..., Any] | str,
    inputs: Any,
    *,
    sizes: Iterable[str] | Mapping[str, Any] | None = None,
    gradients: bool = True,
    budget_s: float | None = None,
) -> Check:
    """Compare a candidate's results and speed with a reference at each size; restore all state.

    Args:
        candidate: a function or module; or its location as text, such as "kernels.py:softmax".
        reference: the function or module that the candidate replaces, or its location.
        inputs: a function that returns new tensors: one, a list, a tuple, or a dict of keyword
            arguments; or its location. A required parameter of the function gets the size.
        sizes: names of built-in sizes (single, small, odd, realistic: each is batch, heads, length,
            head_dim; default: all), or a dict of your own sizes by name.
        gradients: if False, only the forward pass is compared and timed.
        budget_s: seconds for all sizes together (default 30); if short, later sizes are skipped.

    Returns:
        A `Check`: `passed` (equal within rounding at each size not skipped), `faults` and times.

    Raises:
        ArgumentError: `candidate`, `reference`, `inputs` or a size is invalid.
        StepError: another argument is invalid, or the reference's results differ with equal seeds.
            Errors of `inputs` and of the reference's first calls are raised, unless out of memory.

    Example::

        check(fast_attention, attention, lambda size: [torch.randn(size) for _ in "qkv"]).passed
    """
    seconds = arguments.seconds("budget_s", budget_s) or CHECK_BUDGET_S
    arguments.flag("gradients", gradients)
    with ExitStack() as stack:
        if measurement_guard.in_progress() is None:  # an active guard restores state itself
            every = Step(lambda context: None, (), others=[candidate, reference, inputs])
            stack.enter_context(every.guarded())
        stack.enter_context(generators_kept())
        stack.callback(PatchWatch().changes)
        truth = _callable("reference", reference)
        watch = PatchWatch()
        rewrite = _callable("candidate", candidate)
        watch.changes()  # undoes patches by the candidate's file
        own, other = Side(truth, gradients), Side(rewrite, gradients, watched=True)
        stack.callback(own.close)
        stack.callback(other.close)
        is_alike = own.shapes == other.shapes and None not in own.shapes.values()
        drawn = InputSource(_loaded(inputs), truth, own.state if is_alike else {})
        found = RewriteJudge(other, own, drawn, seconds).run(_sizes(sizes, drawn.takes_size))
        where = environment(own.device)
    remarks = (*([] if is_alike else [OTHER_WEIGHTS]), *_not_compared(found, gradients))
    return Check(_name(candidate), _name(reference), tuple(found), where, remarks)


def _not_compared(found: Iterable[SizeCheck], gradients: bool) -> Iterator[str]:
    every = [(size.name, one) for size in found for one in size.agreements]
    if gradients and every and not any(one.name.startswith(GRADIENT) for _, one in every):
        yield "no gradients were compared: the reference gives none"
    for size, one in every:
        if one.explained >= 1:
            yield f"{size}: {one.name} is not judged: rounding alone moves it by its own size"


def _callable(label: str, value: Any) -> Any:
    found = _loaded(value)
    if not callable(found) or isinstance(found, type):
        raise ArgumentError(f"{label} must be a function or a module, not {arguments.shown(found)}")
    return found


def _loaded(value: Any) -> Any:
    """Return `value`, or, for a text "file.py:name", run the file and return the named object."""
    if not (isinstance(value, str) and ".py:" in value):
        return value
    path, _, name = value.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not name.isidentifier():
        raise ArgumentError(f"{value!r} must name a function of a file, as in kernels.py:softmax")
    if not file.is_file():
        raise ArgumentError(f"there is no file {path}")
    module = ModuleType(f"_checked_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look the module up there
    names = vars(module)
    exec(compile(file.read_bytes(), file, "exec"), names)
    if name not in names:
        raise ArgumentError(f"{file.name} has no {name}.{did_you_mean(name, names)}")
    found = names[name]
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        torch.manual_seed(0)
        found = found()
    return found


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _sizes(asked: Any, takes_size: bool) -> dict[str, Any]:
    if not takes_size:
        if asked is not None:
            raise ArgumentError("sizes need a function of a size as inputs: lambda size: ...")
        return {"given": None}
    if isinstance(asked, Mapping):
        return dict(asked)
    names = list(SIZES) if asked is None else arguments.names("sizes", asked)
    for name in names:
        if name not in SIZES:
            raise ArgumentError(f"there is no size {name!r}: choose from {', '.join(SIZES)}")
    return {name: size for name, size in SIZES.items() if name in names}
