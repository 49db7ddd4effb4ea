"""`check()`: is a rewrite right, and how fast?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import GRADIENT, LocalSide
from speedkit_jupyter.extras.check.inputs import InputSource
from speedkit_jupyter.extras.check.judge import RewriteJudge, Side
from speedkit_jupyter.extras.check.processes import RemoteSide, is_word, loaded, located
from speedkit_jupyter.extras.check.result import Check, SizeCheck
from speedkit_jupyter.right.tolerance import UNDETERMINED
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.state import guard
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

# Shapes by name: batch, heads, length, head_dim. One row, an odd length, and a shape of models.
SIZES: dict[str, Any] = {
    "single": (1, 1, 1, 16),
    "small": (1, 2, 16, 16),
    "odd": (2, 3, 37, 24),
    "realistic": (2, 8, 512, 64),
}
# Default budget of a check, in seconds.
DEFAULT_S = 30.0
OTHER_WEIGHTS = (
    "the two have other parameters by name: each keeps its own weights in every call, and their "
    "gradients are not compared"
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
    """Return whether `candidate` computes the same as `reference`, and how fast, size by size.

    Args:
        candidate: a function or module; or its place as text, such as "kernels.py:softmax", which
            then runs in its own process.
        reference: the function or module that the candidate replaces, in the same form.
        inputs: a function that returns new tensors for a size, in a sequence or in a dict of
            keywords; or an example of the inputs, whose floating-point numbers are drawn anew.
        sizes: names of built-in sizes (single, small, odd, realistic: each is batch, heads, length,
            head_dim; default: all), or a dict of your own sizes by name.
        gradients: if False, only the forward pass is compared and timed.
        budget_s: seconds for all sizes together (default 30).

    Returns:
        A `Check`: `passed`, `faults`, `to_dict()`, and a report in a notebook.

    Raises:
        ArgumentError: an argument can't be used.
        StepError: a call can't be measured. Errors of the reference and of `inputs` are raised as
            they are.

    Example::

        check(fast_attention, attention, lambda size: [torch.randn(size) for _ in "qkv"]).passed
    """
    seconds = arguments.seconds("budget_s", budget_s) or DEFAULT_S
    arguments.flag("gradients", gradients)
    is_apart = is_word(candidate)
    if is_word(reference) != is_apart:
        raise ArgumentError("name both by file, as in kernels.py:softmax, or neither")
    for one in filter(is_word, (candidate, reference, inputs)):
        located(str(one))
    function = _callable("reference", reference)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        if guard.in_progress() is None:  # else the outer measurement restores everything
            every = Step(lambda context: None, (), others=[candidate, reference, inputs])
            stack.enter_context(every.guarded())
        stack.enter_context(torch.random.fork_rng(devices))
        truth = stack.enter_context(LocalSide(function, gradients))
        own: Side = truth
        if is_apart:
            own = stack.enter_context(RemoteSide(str(reference), gradients))
            other: Side = RemoteSide(str(candidate), gradients)
        else:
            other = LocalSide(_callable("candidate", candidate), gradients, watched=True)
        stack.enter_context(other)
        is_alike = own.shapes == other.shapes and None not in own.shapes.values()
        source = loaded(inputs) if is_word(inputs) else inputs
        drawn = InputSource(source, function, truth.state if is_alike else {})
        judge = RewriteJudge(other, own, truth, drawn, seconds)
        found = judge.run(_sizes(sizes, drawn.takes_size))
        where = environment(truth.device)
    remarks = (*([] if is_alike else [OTHER_WEIGHTS]), *_not_compared(found, gradients))
    return Check(_name(candidate), _name(reference), tuple(found), is_apart, where, remarks)


def _not_compared(found: Iterable[SizeCheck], gradients: bool) -> Iterator[str]:
    """Yield a line for gradients and tensors that could not be wrong."""
    every = [(size.name, one) for size in found for one in size.agreements]
    if gradients and every and not any(one.name.startswith(GRADIENT) for _, one in every):
        yield "no gradients were compared: the reference gives none"
    for size, one in every:
        if one.explained >= UNDETERMINED:
            yield f"{size}: {one.name} is not judged: rounding alone moves it by its own size"


def _callable(label: str, value: Any) -> Any:
    found = loaded(value) if is_word(value) else value
    if not callable(found):
        raise ArgumentError(f"{label} must be a function or a module, not {arguments.shown(found)}")
    return found


def _name(value: Any) -> str:
    return str(value if is_word(value) else getattr(value, "__name__", type(value).__name__))


def _sizes(asked: Any, takes_size: bool) -> dict[str, Any]:
    """Return the sizes by name. Raises ArgumentError for one that the table does not have."""
    if not takes_size:
        if asked is not None:
            raise ArgumentError("sizes need a function of a size as inputs: lambda size: ...")
        return {"given": None}
    if isinstance(asked, Mapping):
        return dict(asked)
    names = list(SIZES) if asked is None else arguments.names("sizes", asked)
    for name in names:
        if name not in SIZES:
            raise ArgumentError(f"there is no size {name!r}.{did_you_mean(name, SIZES)}")
    return {name: size for name, size in SIZES.items() if name in names}
