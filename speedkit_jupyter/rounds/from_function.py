"""Compare variants of a step from Python code, without magics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedkit_jupyter.right.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.step.discovery import bystanders_among, optimizers_among, outermost, reached
from speedkit_jupyter.step.step import UNRUN, Step
from speedkit_jupyter.step.variants import variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.wrappers import each_once
from speedkit_jupyter.torchglue.interrupts import interruptible


@interruptible
def benchmark(
    step: Callable[..., object],
    variants: str | Sequence[str] = ("baseline", "auto"),
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    accuracy: Callable[..., object] | None = None,
    allowed: float | None = None,
    better: str | None = None,
) -> Comparison:
    """Measure `step()` under several variants in shuffled rounds; put back all that it changes.

    Args:
        step: A function without arguments, or one that takes the variant's context: `step(ctx)`.
        variants: Names of plans, the baseline first; a string separates them by commas. Plans that
            don't fit into the budget are left out and named.
        model: The models that get the plans (default: all that the function's code reaches).
        optimizer: Their optimizers (default: all that the function's code reaches).
        budget_s: Seconds for everything but compiling (default: 10, or more if a step is long).
        accuracy: A function that returns a number, or the pair (correct examples, all examples). It
            is called under each variant and decides about plans that change the model's results,
            such as int8. Its time is not part of the budget.
        allowed: How much worse `accuracy` may get, in its own units (default: 1 %).
        better: "higher" or "lower" (default: by the name of `accuracy`).

    Returns:
        A Comparison: a record for each variant, with its ratio to the baseline and a verdict.

    Raises:
        StepError: The step can't be measured, or an argument is invalid.
        ArgumentError: `optimizer` is not a torch optimizer.

    Example::

        benchmark(train_step, "baseline,auto,bf16", budget_s=10)
    """
    names = arguments.names("variants", variants)
    budget_s = arguments.seconds("budget_s", budget_s)
    named = named_accuracy(accuracy, better, allowed)
    measured = Benchmark(
        step_of(step, model, optimizer),
        [variant(name) for name in names],
        budget_s,
        command=_command(step, names, budget_s, named),
        accuracy=named,
    )
    for _ in measured.run():
        pass
    return measured.result()


def step_of(
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Step:
    """Return a function as a step, with the models and optimizers that its code reaches."""
    if not callable(step):
        raise StepError(f"the step must be a function, not {type(step).__name__}")
    _refuse_unrun(step)
    takes_context = _takes_context(step)
    objects = reached([step])
    models = outermost(objects) if model is None else arguments.modules("model", model)
    given = [] if optimizer is None else arguments.optimizers("optimizer", optimizer)
    optimizers = optimizers_among(objects) if optimizer is None else each_once(given)
    return Step(
        step if takes_context else (lambda context: step()),
        models,
        optimizers,
        bystanders_among(objects, [*models, *optimizers]),
        others=[step],
    )


def _refuse_unrun(step: Any) -> None:
    """Raise StepError for a class, and for async and generator functions: a call runs no code."""
    function = step
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", "") or type(function).__name__
    if isinstance(function, type):
        raise StepError(f"the step must be a function that does one step, not the class {name}")
    for code in (function, inspect.getattr_static(type(function), "__call__", None)):
        is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
        if is_async or inspect.isgeneratorfunction(code):
            kind = "an awaitable" if is_async else "a generator"
            raise StepError(f"{name}() makes {UNRUN.format(kind, name)}")


def _takes_context(step: Callable[..., object]) -> bool:
    """Return whether its first argument must be given, or is called `ctx`."""
    try:
        first = next(iter(inspect.signature(step).parameters.values()), None)
    except (TypeError, ValueError):  # some functions that are written in C
        return False
    if first is None or first.kind in (first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    return first.default is first.empty or first.name == "ctx"


def _command(
    step: Callable[..., object],
    names: Sequence[str],
    budget_s: float | None,
    accuracy: NamedAccuracy | None,
) -> str:
    name = getattr(step, "__name__", "step")
    budget = "" if budget_s is None else f", budget_s={budget_s:g}"
    judged = "" if accuracy is None else f", accuracy={accuracy.name}"
    return f"benchmark({name}, {','.join(names)!r}{budget}{judged})"
