"""Tuning and verifying from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.search.verification import STEPS, Verification, Verifier
from speedkit_jupyter.step.variants import CURRENT
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.torchglue.interrupts import interruptible


@interruptible
def tune(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    fresh: bool = False,
    keep: str | Sequence[str] = (),
) -> Tuning:
    """Search for the fastest safe plan for `step()` on this machine, by measuring.

    The search applies no plan; call `Tuning.apply()` for that. All changes of the step are undone.

    Args:
        step: a function that runs one training or inference step.
        model: the model or models that get the plans (default: all that the step reaches).
        optimizer: the optimizers (default: all that the step reaches).
        budget_s: seconds for the whole search, not counting compiling (default: 10 s, or 60 steps
            if these take longer).
        fresh: search anew even if a plan was learned for this step (default: check that plan).
        keep: names of optimizations to leave unchanged; `("precision", "tf32")` keeps full float32.

    Returns:
        A Tuning: the `winner` with its proof, a `likely` plan, or neither.

    Raises:
        StepError: the step can't be measured, or options contradict one another.
        KeyboardInterrupt: after Ctrl-C; its `tuning` is the result so far.

    Example::

        tuning = tune(train_step, budget_s=30)
        ctx, *_ = tuning.apply()
    """
    begun_s = clock.now()
    measured, budget_s = step_of(step, model, optimizer), arguments.seconds("budget_s", budget_s)
    asked = (arguments.flag("fresh", fresh), [keep] if isinstance(keep, str) else keep)
    words = (name_of(notebook(), model, "") for model in measured.models)
    named = tuple(filter(None, words))
    search = PlanSearch(measured, budget_s, *asked, named=named, begun_s=begun_s)
    try:
        for _ in search.run():
            pass
    except KeyboardInterrupt as interrupt:
        interrupt.tuning = search.result()  # type: ignore[attr-defined]
        raise
    return search.result()


@interruptible
def verify(
    step: Callable[..., object],
    plan: str | SpeedConfig = CURRENT,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    steps: int = STEPS,
) -> Verification:
    """Train with and without a plan and compare the loss curves.

    Each run starts from the model's current state, with the same seed and data. A second baseline
    with another seed shows the usual distance of two curves. All changes of the runs are undone.

    Args:
        step: a function that runs one training step.
        plan: the name of a variant (default: "current", the plan in force), or a config.
        model: the model or models (default: all that the step reaches).
        optimizer: the optimizers (default: all that the step reaches).
        steps: number of calls of the step in each run (default: 50).

    Returns:
        A Verification with the `verdict` and the curves.

    Raises:
        StepError: the step can't be verified, or the plan changes nothing.

    Example::

        verify(train_step, "bf16", steps=100).verdict
    """
    steps = arguments.whole("steps", steps)
    if not isinstance(plan, SpeedConfig):
        plan = arguments.name("plan", plan)
    measured = step_of(step, model, optimizer)
    models = " and ".join(type(module).__name__ for module in measured.models)
    subject = f"{models} in `{getattr(step, '__name__', 'step')}`"
    verifier = Verifier(measured, plan, steps, subject)
    for _ in verifier.run():
        pass
    return verifier.result()
