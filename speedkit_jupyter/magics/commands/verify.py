"""%speedkit verify: find the step and the plan, train, show the curves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.accuracy import add_accuracy, named
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.errors import STOPPED
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import (
    check_result_name,
    find_function,
    find_model,
    inside_others,
)
from speedkit_jupyter.magics.options import offer, whole_number
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, required
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import AUTO, CURRENT
from speedkit_jupyter.plans.applying import plan_applied_to
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.tuning import learning
from speedkit_jupyter.tuning.api import verifier_of


@lets_go
def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Train with and without; Ctrl-C shows the curves so far and then stops the notebook."""
    __tracebackhide__ = True
    check_result_name("%speedkit verify", arguments.v, names)
    accuracy = named(names, arguments, "%speedkit verify")
    step, number, title = _step(names, session, arguments, accuracy)
    verifier = verifier_of(step, arguments.plan or _plan(session, step), number, accuracy)
    verifier.result().subject = subject = _subject(session, step, title)
    with ProgressLine(f"verifying {subject}".replace("`", "")) as progress:
        steps = verifier.run()
        try:
            for state in steps:
                progress.show(state)
        except KeyboardInterrupt:
            steps.close()
            if verifier.has_results():
                progress.replace(verifier.result())
            raise KeyboardInterrupt(STOPPED) from None
        progress.replace(verifier.result())
    if arguments.v:
        names[arguments.v] = verifier.result()


def _step(
    names: Mapping[str, Any],
    session: Session,
    arguments: Namespace,
    accuracy: NamedAccuracy | None,
) -> tuple[Step, int, str]:
    """The step, how many of them are trained, and what it is called.

    Where there is none but an accuracy, that is all that is run.
    """
    name = arguments.step
    if accuracy is not None and name in (None, accuracy.name) and (name or not session.measured):
        models = [find_model(names, None)[1]] if required(accuracy.function) else []
        return step_of(accuracy.bound(models)), 0, accuracy.name
    if name is not None:
        return step_of(find_function(names, name, "%speedkit verify")), arguments.steps, name
    if session.measured is None:
        raise UsageError(
            "%speedkit verify: which step? Run a %%speedbench cell before, or name a function: "
            "--step train_step"
        )
    return session.measured.step(), arguments.steps, session.measured.title


def _subject(session: Session, step: Step, title: str) -> str:
    """`model` in `train_step`: what the curves are of; one without a name is `a GAN`, say."""
    held = {id(model): word for word, model in inside_others(session.names or {}).items()}
    names = [session.name_of(model, held.get(id(model), "")) for model in step.models]
    words = zip(names, step.models, strict=True)
    models = " and ".join(
        f"`{word}`" if word else f"a {type(model).__name__}" for word, model in words
    )
    return f"{models} in `{title}`"


def _plan(session: Session, step: Step) -> Any:
    """What was tuned last, else what is in force, was learned, or what the rules would do."""
    if not step.models:
        return AUTO
    if (found := session.found_for(step.models[0])) is not None and found.is_newer and found.proof:
        return found.config
    if any(plan_applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=50,
        metavar="NUMBER",
        help="how often each run calls the step (50)",
    )
    step = "the function that trains; without it the last %%speedbench cell"
    parser.add_argument("--step", metavar="NAME", help=step)
    plan = "a plan as for --compare; without it what is applied, learned, or by rules"
    offer(parser.add_argument("--plan", metavar="NAME", help=plan), suggestions.plans)
    add_accuracy(parser)
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")


COMMAND = Command(
    "verify", "train with and without a plan, and compare the loss curves", run, _arguments
)
