"""Measuring from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.discovery import (
    bystanders_among,
    optimizers_among,
    outermost,
    reached,
)
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.unrun import refuse_unrun_function
from speedkit_jupyter.measure.subject.variants import variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    import torch


@lets_go
@in_windows
def benchmark(
    step: Callable[..., object],
    variants: str | Sequence[str] = ("baseline", "auto"),
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    throughput: bool = False,
    accuracy: Callable[..., object] | None = None,
    allowed: float | None = None,
    better: str | None = None,
) -> Comparison:
    """Measure `step()` under several variants for `budget_s` seconds in all.

    What compiling takes comes on top. Without a budget it is 10 s, and more where a step takes so
    long that a clear answer does. With a short one fewer variants are measured, which is said.
    Models and optimizers that are not given are those that the function's code reaches. A step
    that takes one argument is given the variant's context: `def step(ctx)`. The device is
    synchronized around each step, or with `throughput` around blocks of steps. `accuracy` is a
    function of yours that gives a number (or how many examples are right, of how many), asked under
    each variant: it decides about plans that make another model. `allowed` is how much worse it may
    be, in its own units (1 % of what it is, without), `better` is "higher" or "lower", by its name
    where you don't say. What it takes comes on top. Raises StepError where something can't be
    measured; whatever happens, all that it changed is put back.
    """
    begun_s = clock.now()
    names = arguments.names("variants", variants)
    budget_s = arguments.seconds("budget_s", budget_s)
    named = named_accuracy(accuracy, better, allowed)
    measured = Benchmark(
        step_of(step, model, optimizer),
        [variant(name) for name in names],
        budget_s,
        throughput=arguments.flag("throughput", throughput),
        command=_command(step, names, budget_s, named),
        accuracy=named,
    )
    measured.begun_s = begun_s
    for _ in measured.run():
        pass
    return measured.result()


def step_of(
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Step:
    """A function as a step, with the models and optimizers that its code reaches."""
    if not callable(step):
        raise StepError(f"the step must be a function, not {type(step).__name__}")
    refuse_unrun_function(step)
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


def _takes_context(step: Callable[..., object]) -> bool:
    """Whether its first argument must be given, or is called `ctx`: defaults are the user's own."""
    try:
        first = next(iter(inspect.signature(step).parameters.values()), None)
    except (TypeError, ValueError):  # some of those that are written in C
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
    """The call and, where Python can still read it, the source of the step."""
    name = getattr(step, "__name__", "step")
    budget = "" if budget_s is None else f", budget_s={budget_s:g}"
    judged = "" if accuracy is None else f", accuracy={accuracy.name}"
    call = f"benchmark({name}, {','.join(names)!r}{budget}{judged})"
    try:
        return f"{inspect.getsource(step).rstrip()}\n\n{call}"
    except (OSError, TypeError):
        return call
