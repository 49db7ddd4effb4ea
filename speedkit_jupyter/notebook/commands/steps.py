"""%speedkit advise, verify, loader, batch: find the step, measure it, show the result."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.extras.advise.advisor import Advised, Advisor, over_batches
from speedkit_jupyter.extras.data.batch_sweep import sweep_of
from speedkit_jupyter.extras.data.loader_tuner import LoaderTuner, step_over
from speedkit_jupyter.extras.profile.profiler import Profiler, profiler_of
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command, names_of, whole_number
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import MeasuredCell, Session, public
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.right.named_accuracy import NamedAccuracy, required
from speedkit_jupyter.rounds.budget import DEFAULT_S
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.api import verifier_of
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import AUTO, CURRENT
from speedkit_jupyter.support.lookup import value_of
from speedkit_jupyter.torchglue.samples import length_of

NO_STEP = "which step? Run a %%speedbench cell before, or name a function: --step train_step"


def last_cell(session: Session) -> MeasuredCell:
    """Return the last `%%speedbench` cell; raises UsageError without one."""
    if session.measured is None:
        raise UsageError(NO_STEP)
    return session.measured


@command(
    "what would make a step faster: evidence, expected gain, risk",
    options.MODEL,
    options.step("the function to look at; without it the last %%speedbench cell"),
    options.LOADER,
    Option("--try", "NUMBER", "measure this one, or a rule", dest="wanted"),
    options.budget(f"for all of it ({DEFAULT_S:g})"),
    options.RESULT,
)
def advise(names: Names, session: Session, arguments: Namespace) -> None:
    asked, last = (arguments.step, arguments.model, arguments.loader), session.last_advice
    is_known = last is not None and (last.asked == asked or not any(asked))
    if not (arguments.wanted and is_known):
        last = session.last_advice = _advised(names, session, arguments, asked)
    if arguments.wanted:
        text = f"%speedkit advise --try {arguments.wanted}"
        wanted = int(arguments.wanted) if arguments.wanted.isdecimal() else arguments.wanted
        trial = last.benchmark(wanted, arguments.budget, text)
        measured(trial, "trying", names, arguments.v)


def _advised(names: Names, session: Session, arguments: Namespace, asked: Any) -> Advised:
    name, budget_s, words = arguments.step, arguments.budget, namespace.names_of_models(names)
    anew: Callable[[], Step]
    if name is None:
        cell = last_cell(session)
        anew, subject = cell.step, cell.title
        profiler = Profiler(anew(), budget_s, cell.command, words)
    else:
        model = None if arguments.model is None else namespace.find_model(names, arguments.model)[1]
        function = _over_batches(names, name, arguments.loader)
        text = f"%speedkit advise --step {name}"
        profiler, subject = profiler_of(function, model, None, budget_s, text, words), name
        # For --try, with what the names mean by that time.
        anew = lambda: step_of(_over_batches(names, name, arguments.loader), model)  # noqa: E731
    called = {id(value): word for word, value in names.items() if word[:1] != "_"}
    loader = namespace.find_loader(names, arguments.loader)
    advisor = Advisor(profiler, called, [] if loader is None else [loader], subject)
    variable = None if arguments.wanted else arguments.v
    found = measured(advisor, "looking for what is slow", names, variable).opportunities
    return Advised(list(found), anew, asked)


def _over_batches(names: Names, name: str, loader: str | None) -> Any:
    function, given = namespace.find_function(names, name), namespace.find_loader(names, loader)
    return over_batches(function, given, name, "name its DataLoader by --loader")


@command(
    "train with and without a plan, and compare the loss curves",
    Option("--steps", "NUMBER", "calls in each run (50)", type=whole_number, default=50),
    options.step("the function that trains; without it the last %%speedbench cell"),
    Option("--plan", "NAME", "without it what was tuned, applied or learned", options.plans),
    *options.ACCURACY,
    options.RESULT,
)
def verify(names: Names, session: Session, arguments: Namespace) -> None:
    accuracy = options.accuracy_of(names, arguments)
    step, number, title = _trained(names, session, arguments, accuracy)
    verifier = verifier_of(step, arguments.plan or _plan(session, step), number, accuracy)
    verifier.result().subject = f"`{title}`"
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
    if (found := session.found_for(step.models[0])) and found.is_newer and found.proof:
        return found.config
    if any(applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO


# --- loaders and batch sizes ---


@command(
    "the fastest settings of a DataLoader, measured with your step",
    Option("loader", "LOADER", "without it the only one", namespace.loaders, nargs="?"),
    options.step("a function that takes a batch, or goes through the loader; or the last cell"),
    options.budget("for all of it (20)"),
    options.RESULT,
)
def loader(names: Names, session: Session, arguments: Namespace) -> None:
    known = [arguments.loader] if arguments.loader else list(namespace.loaders(names))
    if not known:
        raise UsageError("there is no DataLoader in this notebook yet: make one first")
    if len(known) > 1:
        raise UsageError(f"which one? {', '.join(known)}")
    found = namespace.find_loader(names, name := known[0])
    step, against = _step_with(names, session, arguments.step, found)
    asked = f" --step {arguments.step}" if arguments.step else ""
    text = f"%speedkit loader {name}{asked}"
    tuner = LoaderTuner(step, found, arguments.budget, name, against, text)
    measured(tuner, "loading", names, arguments.v, lambda result: result.loader)


def _step_with(names: Names, session: Session, name: str | None, loader: Any) -> tuple[Step, str]:
    """Return the named function, or the last cell if it uses this loader, or loading alone."""
    if name is not None:
        return step_over(loader, namespace.find_function(names, name)), name
    if session.measured is not None:
        step = session.measured.step()
        if any(value is loader for value in step.walk().found.values()):
            return step, session.measured.title
    return step_over(loader), ""


def _sizes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is no range of sizes: give one as in 8:4096")
    return int(least), int(most)


@command(
    "samples a second and peak memory by batch size: knee, fastest, largest",
    options.step("a function that takes a batch, or reads its tensors; without it the last cell"),
    Option("--data", "NAMES", "the batch that it takes, or reads by name: x,y", type=names_of),
    options.LOADER,
    Option("--range", "SIZES", "of sizes (8:4096)", type=_sizes, default=(8, 4096)),
    options.budget("for all of it (20)"),
    options.RESULT,
)
def batch(names: Names, session: Session, arguments: Namespace) -> None:
    loader, data = namespace.find_loader(names, arguments.loader), None
    if arguments.data:
        known = [name for name, value in public(names) if length_of(value) is not None]
        data = tuple(value_of(names, word, known, "variable") for word in arguments.data)
    text, title = "%speedkit batch", ""
    if arguments.step is None:
        cell = last_cell(session)
        step, title = cell.step(), cell.title
    else:
        step = namespace.find_function(names, arguments.step)
        text += f" --step {arguments.step}"
    sweep = sweep_of(step, data, loader, arguments.range, arguments.budget, text, title)
    measured(sweep, "batches", names, arguments.v)
