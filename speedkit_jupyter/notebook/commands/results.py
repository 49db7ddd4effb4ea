"""%speedkit verify, tuned, cache: results, learned plans and compiled code."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, whole_number
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.tuning_report import cache_report, tuned_list
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.search.verification import STEPS, Verifier
from speedkit_jupyter.step.step import Step, over_batches
from speedkit_jupyter.step.variants import AUTO, CURRENT
from speedkit_jupyter.support import database
from speedkit_jupyter.support.units import count, size


@command(
    "train with and without a plan, and compare the loss curves",
    Option("--steps", "NUMBER", f"calls in each run ({STEPS})", type=whole_number, default=STEPS),
    options.step("the training function (default: the last %%speedbench cell)"),
    Option("--plan", "NAME", "(default: the plan tuned, applied or learned)", options.plans),
    options.RESULT,
)
def verify(names: Names, session: Session, arguments: Namespace) -> None:
    step, title = _trained(names, session, arguments.step)
    plan = arguments.plan or _plan(session, step)
    verifier = Verifier(step, plan, arguments.steps, f"`{title}`")
    measured(verifier, f"verifying {title}", names, arguments.v)


def _trained(names: Names, session: Session, name: str | None) -> tuple[Step, str]:
    """Return the step and its name."""
    if name is None:
        cell = session.last_cell()
        return cell.step(), cell.title
    function = namespace.find_function(names, name)
    step = over_batches(function, None, name, "write a function that returns one")
    return step_of(step), name


def _plan(session: Session, step: Step) -> Any:
    if not step.models:
        return AUTO
    if (found := MEMORY.of(step.models[0])) and found.is_newer and found.proof:
        return found.config
    if any(applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO


@command(
    "the plans that tuning has learned; `tuned forget NUMBER` deletes one",
    options.action("list", "forget"),
    Option("which", "NUMBER", "for forget: the plan's number, or all", words=("all",), nargs="?"),
)
def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    which = arguments.which
    if arguments.action == "list":
        display(tuned_list(database.learned()))
        return
    if which is None:
        raise UsageError("forget: which NUMBER? (or all; %speedkit tuned lists them)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 19 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"forget: there is no plan {which:.20}; %speedkit tuned lists them")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


@command("the compiled code that is stored between sessions", options.action("status", "clear"))
def cache(names: Names, session: Session, arguments: Namespace) -> None:
    """Show or delete the compiled code."""
    if arguments.action == "clear":
        display(Document(f"Deleted {size(compile_cache.clear())} of compiled code"))
    else:
        display(cache_report())
