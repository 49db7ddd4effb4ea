"""Tuning from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.right.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.search.verification import Verification, Verifier
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import CURRENT, config_of, variant
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

    `budget_s` are the seconds for it all, beside compiling; without one 10 s, or 60 steps where
    these take longer. With `steps` the objective is the total time of this many steps, compiling
    included; with `objective` "memory" the peak of a step, which may cost no accuracy, and time up
    to `within` times. A plan that was learned for this very step is only checked again, unless the
    search is to be `fresh`. What is named in `keep` stays as it is: `keep=("precision", "tf32")`
    searches in full float32. `more` is an earlier search for this step: it goes on with all that it
    knows, and as it was asked. Nothing is applied: `Tuning.apply()` does. Raises StepError where
    the step can't be measured; all that it changed is put back. Ctrl-C goes on to the caller, with
    what is known so far as the error's `tuning`.
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
    search = going_on(measured, more, budget_s) if more else PlanSearch(measured, budget_s, *asked)
    search.begun_s = begun_s
    words = (name_of(notebook(), model, "") for model in measured.models)
    search.result().named = tuple(filter(None, words))
    try:
        for _ in search.run():
            pass
    except KeyboardInterrupt as interrupt:
        tuning = interrupt.tuning = search.result()  # type: ignore[attr-defined]
        if hasattr(interrupt, "add_note"):  # from Python 3.11 on
            known = tuning.unclear or f"the best so far is {tuning.winner.name}: {tuning.proven}"
            interrupt.add_note(f"{known} (sys.last_value.tuning has it)")
        raise
    return search.result()


def going_on(step: Step, tuning: Tuning, budget_s: float | None = None) -> PlanSearch:
    """Return a search that goes on with all that another one knows; raises StepError."""
    if not tuning.is_of(step.models):
        raise StepError("more: the earlier search was for another model; search anew for this one")
    asked = (tuning.steps, tuning.objective, False, tuning.kept, tuning.within)
    return PlanSearch(step, budget_s, *asked, known=tuning.known)


@interruptible
def verify(
    step: Callable[..., object],
    plan: str | SpeedConfig = CURRENT,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    steps: int = 50,
    accuracy: Callable[..., object] | None = None,
    allowed: float | None = None,
    better: str | None = None,
) -> Verification:
    """Train for some `steps` with and without a plan and compare the loss curves.

    `plan` is a variant's name (`current`: what is applied now) or a config. Each run begins from
    the model as it is, with the same seed and data; a second baseline with another seed shows how
    far apart two curves lie anyway. `accuracy` is your function that returns a number (or how many
    examples are right, of how many): it decides then, asked at the end of each run, or at once
    where the step does not train. `allowed` is how much worse it may be, in its own units; `better`
    is "higher" or "lower", without it what its name says. All that the runs changed is put back.
    Raises StepError.
    """
    steps = arguments.whole("steps", steps)
    if not isinstance(plan, SpeedConfig):
        plan = arguments.name("plan", plan)
    measured = step_of(step, model, optimizer)
    verifier = verifier_of(measured, plan, steps, named_accuracy(accuracy, better, allowed))
    models = " and ".join(type(module).__name__ for module in measured.models)
    verifier.result().subject = f"{models} in `{getattr(step, '__name__', 'step')}`"
    for _ in verifier.run():
        pass
    return verifier.result()


def verifier_of(
    step: Step, plan: str | SpeedConfig, steps: int, accuracy: NamedAccuracy | None = None
) -> Verifier:
    """Return a verifier of a variant by its name, or of a config."""
    if isinstance(plan, SpeedConfig):
        return Verifier(step, "plan", plan, steps, accuracy)
    chosen = variant(plan)
    configs = (config_of(chosen, model) for model in step.models)
    config = next((config for config in configs if config is not None), None)
    return Verifier(step, plan, config, steps, accuracy)
