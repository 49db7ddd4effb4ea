"""Compare variants of a step from Python code, without magics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch

from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.named_accuracy import named_accuracy
from speedkit_jupyter.step.discovery import bystanders_among, optimizers_among, outermost, reached
from speedkit_jupyter.step.step import Step
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
) -> Comparison:
    """Measure `step()` under several variants in shuffled rounds; put back all that it changes.

    Args:
        step: A function without arguments, or one that takes the variant's context: `step(ctx)`.
        variants: Names of plans, the baseline first; a string separates them by commas. Plans that
            don't fit into the budget are left out and named.
        model: The models that get the plans (default: all that the function's code reaches).
        optimizer: Their optimizers (default: all that the function's code reaches).
        budget_s: Seconds for everything but compiling (default: 10, or more if a step is long).
        accuracy: A function that returns a number, which is shown for each variant: for plans that
            change the model's results, such as int8. Its time is not part of the budget.

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
    named = named_accuracy(accuracy)
    plans = [variant(name) for name in names]
    measured = Benchmark(step_of(step, model, optimizer), plans, budget_s, accuracy=named)
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
    """Return whether the first argument is required, or named `ctx`."""
    try:
        first = next(iter(inspect.signature(step).parameters.values()), None)
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    if first is None or first.kind in (first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    return first.default is first.empty or first.name == "ctx"
