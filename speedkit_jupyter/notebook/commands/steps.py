"""%speedkit verify: find the step, train with and without the plan, show the result."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, whole_number
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import MeasuredCell, Session
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.right.named_accuracy import NamedAccuracy, required
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.search.verification import STEPS, Verifier
from speedkit_jupyter.step.over_batches import over_batches
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import AUTO, CURRENT

NO_STEP = "which step? Run a %%speedbench cell before, or name a function: --step train_step"


def last_cell(session: Session) -> MeasuredCell:
    """Return the last `%%speedbench` cell; raises UsageError without one."""
    if session.measured is None:
        raise UsageError(NO_STEP)
    return session.measured


@command(
    "train with and without a plan, and compare the loss curves",
    Option("--steps", "NUMBER", f"calls in each run ({STEPS})", type=whole_number, default=STEPS),
    options.step("the function that trains; without it the last %%speedbench cell"),
    Option("--plan", "NAME", "(the plan that was tuned, applied or learned)", options.plans),
    *options.ACCURACY,
    options.RESULT,
)
def verify(names: Names, session: Session, arguments: Namespace) -> None:
    accuracy = options.accuracy_of(names, arguments)
    step, number, title = _trained(names, session, arguments, accuracy)
    plan = arguments.plan or _plan(session, step)
    verifier = Verifier(step, plan, number, accuracy, f"`{title}`")
    measured(verifier, f"verifying {title}", names, arguments.v)


def _trained(
    names: Names, session: Session, arguments: Namespace, accuracy: NamedAccuracy | None
) -> tuple[Step, int, str]:
    """Return the step, its number of calls, and its name; an accuracy may be all that runs."""
    name = arguments.step
    if accuracy is not None and name in (None, accuracy.name) and (name or not session.measured):
        models = [namespace.find_model(names, None)[1]] if required(accuracy.function) else []
        return step_of(accuracy.bound(models)), 0, accuracy.name
    if name is not None:
        function = namespace.find_function(names, name)
        step = over_batches(function, None, name, "give it one in a function of your own")
        return step_of(step), arguments.steps, name
    cell = last_cell(session)
    return cell.step(), arguments.steps, cell.title


def _plan(session: Session, step: Step) -> Any:
    if not step.models:
        return AUTO
    if (found := MEMORY.of(step.models[0])) and found.is_newer and found.proof:
        return found.config
    if any(applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO
