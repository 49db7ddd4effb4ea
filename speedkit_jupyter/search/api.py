"""Tuning and verifying from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.right.named_accuracy import named_accuracy
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.search.verification import STEPS, Verification, Verifier
from speedkit_jupyter.step.variants import CURRENT
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.torchglue.interrupts import interruptible


@interruptible
def tune(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    steps: int | None = None,
    objective: str = "time",
    within: float | None = None,
    fresh: bool = False,
    keep: str | Sequence[str] = (),
    more: Tuning | None = None,
) -> Tuning:
    """Search the fastest safe plan for `step()` on this machine, by measuring.

    Nothing is applied: `Tuning.apply()` does. All that the step changed is put back.

    Args:
        step: a function that runs one training or inference step.
        model: the model or models that get the plans (default: those that the step reaches).
        optimizer: the optimizers (default: those that the step reaches).
        budget_s: seconds for the whole search, not counting compiling (default: 10 s, or 60 steps
            if these take longer).
        steps: find the least total time of this many steps, compiling included.
        objective: "time" of a step, or "memory", its peak.
        within: with "memory", how many times slower a step may get.
        fresh: search although a plan was learned for this step; otherwise that one is checked.
        keep: optimizations to leave as they are: `("precision", "tf32")` searches in full float32.
        more: an earlier search for this step, which goes on with all that it knows.

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
    asked = (
        None if steps is None else arguments.whole("steps", steps),
        objective,
        arguments.flag("fresh", fresh),
        [keep] if isinstance(keep, str) else keep,
        arguments.amount("within", within),
    )
    arguments.of_kind("more", more, Tuning)
    if more is not None and asked != (None, "time", False, (), None):
        raise StepError("more goes on as it was asked: leave out steps, objective, fresh, keep …")
    words = (name_of(notebook(), model, "") for model in measured.models)
    named = tuple(filter(None, words))
    if more is not None:
        search = PlanSearch.going_on(measured, more, budget_s, named)
    else:
        search = PlanSearch(measured, budget_s, *asked, named=named)
    search.begun_s = begun_s
    try:
        for _ in search.run():
            pass
    except KeyboardInterrupt as interrupt:
        _add_result(interrupt, search.result())
        raise
    return search.result()


def _add_result(interrupt: KeyboardInterrupt, tuning: Tuning) -> None:
    """Let an interrupt carry the result so far, and tell it."""
    interrupt.tuning = tuning  # type: ignore[attr-defined]
    if hasattr(interrupt, "add_note"):  # from Python 3.11 on
        known = tuning.unclear or f"the best so far is {tuning.winner.name}: {tuning.proven}"
        interrupt.add_note(f"{known} (sys.last_value.tuning has it)")


@interruptible
def verify(
    step: Callable[..., object],
    plan: str | SpeedConfig = CURRENT,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    steps: int = STEPS,
    accuracy: Callable[..., object] | None = None,
    allowed: float | None = None,
    better: str | None = None,
) -> Verification:
    """Train with and without a plan and compare the loss curves.

    Each run begins from the model as it is, with the same seed and data. A second baseline with
    another seed shows how far apart two curves are anyway. All that the runs changed is put back.

    Args:
        step: a function that runs one training step.
        plan: the name of a variant (`current` is the plan in force), or a config.
        model: the model or models (default: those that the step reaches).
        optimizer: the optimizers (default: those that the step reaches).
        steps: calls of the step in each run.
        accuracy: a function that returns a number (or the number of right examples and of all).
            Its number decides then; it is called at the end of each run, or at once where the step
            does not train.
        allowed: how much worse the number may be, in its own units (default: 1 %).
        better: "higher" or "lower" (default: lower for a loss or an error, by the function's name).

    Returns:
        A Verification with the `verdict`, the curves and the accuracy.

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
    named = named_accuracy(accuracy, better, allowed)
    verifier = Verifier(measured, plan, steps, named, subject)
    for _ in verifier.run():
        pass
    return verifier.result()
