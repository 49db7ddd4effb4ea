"""%speedkit advise, loader, batch, verify: find the step, measure it, show the result."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Command, Names, Parser, names_of, whole_number
from speedkit_jupyter.magics.namespace import (
    check_result_name,
    find_function,
    find_model,
    inside_others,
    loaders,
    models,
    named_loader,
)
from speedkit_jupyter.magics.options import (
    accuracy_of,
    add_accuracy,
    add_budget,
    add_model,
    add_result,
    add_step,
)
from speedkit_jupyter.magics.progress import measured
from speedkit_jupyter.session import MeasuredCell, Session
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import value_of
from speedkit_jupyter.support.samples import length_of
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from speedkit_jupyter.batching.sweep import Sweep
    from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
    from speedkit_jupyter.measure.subject.step import Step
    from speedkit_jupyter.profiling.profiler import Profiler

ADVISING, LOADING = "%speedkit advise", "%speedkit loader"
BATCHES, VERIFYING = "%speedkit batch", "%speedkit verify"


def _last_cell(session: Session, command: str) -> MeasuredCell:
    """Return the last `%%speedbench` cell; raises UsageError without one."""
    if session.measured is None:
        raise UsageError(
            f"{command}: which step? Run a %%speedbench cell before, or name a function: "
            "--step train_step"
        )
    return session.measured


@lets_go
def advise(names: Names, session: Session, arguments: Namespace) -> None:
    """Advise, or with --try compare the step with and without a piece of advice."""
    __tracebackhide__ = True
    from speedkit_jupyter.advice.advisor import Advisor

    check_result_name(ADVISING, arguments.v, names)
    if arguments.wanted:
        if session.advised is None:
            raise UsageError(f"{ADVISING} --try: nothing was advised yet: {ADVISING}")
        if arguments.step not in (None, session.advised.subject):
            raise UsageError(
                f"{ADVISING} --try: the last advice is about {session.advised.subject}: first "
                f"{ADVISING} --step {arguments.step}"
            )
        command = f"{ADVISING} --try {arguments.wanted}"
        engine = session.advised.benchmark(arguments.wanted, arguments.budget, command)
        measured(engine, "trying", names, arguments.v)
        return
    profiler, subject = _profiler(names, session, arguments)
    called = {id(value): name for name, value in names.items() if name[:1] != "_"}
    loader = named_loader(names, arguments.loader, ADVISING)
    advisor = Advisor(profiler, called, [] if loader is None else [loader], subject)
    measured(advisor, "looking for what is slow", names, arguments.v)
    _remember(names, session, arguments, advisor)


def _profiler(names: Names, session: Session, arguments: Namespace) -> tuple[Profiler, str]:
    """Return the profiler of the function that is named, or of the last cell."""
    from speedkit_jupyter.profiling.api import profiler_of

    model = None if arguments.model is None else find_model(names, arguments.model)[1]
    if arguments.step is None:
        cell = _last_cell(session, ADVISING)
        assert cell.profiler is not None
        return cell.profiler(arguments.budget), cell.title
    function = _over_batches(names, arguments.step, arguments.loader)
    command = f"{ADVISING} --step {arguments.step}"
    called = {id(value): name for name, value in models(names).items()}
    profiler = profiler_of(function, model, None, arguments.budget, command, called)
    return profiler, arguments.step


def _over_batches(names: Names, name: str, loader: str | None) -> Any:
    """The function that is named; an epoch of the loader, where it takes batches."""
    from speedkit_jupyter.advice.advisor import over_batches

    function = find_function(names, name, ADVISING)
    given = named_loader(names, loader, ADVISING)
    return over_batches(function, given, name, "name its DataLoader by --loader")


def _remember(names: Names, session: Session, arguments: Namespace, advisor: Any) -> None:
    """For --try; the step is made anew then, with what its names mean by that time."""
    from speedkit_jupyter.advice.advisor import Advised
    from speedkit_jupyter.measure.subject.from_function import step_of

    name, loader, cell = arguments.step, arguments.loader, session.measured

    def step() -> Any:
        if name is not None:
            return step_of(_over_batches(names, name, loader))
        assert cell is not None
        return cell.step()

    result = advisor.result()
    session.advised = Advised(list(result.opportunities), step, result.subject)


def _wanted(text: str) -> int | str:
    return text if text.isidentifier() else int(whole_number(text))


_wanted.__name__ = "whole number"


def _advise_options(parser: Parser) -> None:
    add_model(parser)
    add_step(parser, "the function to look at; without it the last %%speedbench cell")
    hidden = "its DataLoader, where the code hides it"
    parser.option("--loader", "NAME", hidden, suggestions.loaders)
    trying = "measure the opportunity of this number or rule: the step with it and as it is"
    parser.option("--try", "NUMBER", trying, type=_wanted, dest="wanted")
    add_budget(parser, "for all of it (10)")
    add_result(parser)


@lets_go
def loader(names: Names, session: Session, arguments: Namespace) -> None:
    """Measure the settings of a DataLoader with a step."""
    __tracebackhide__ = True
    from speedkit_jupyter.loading.tuner import LoaderTuner
    from speedkit_jupyter.measure.rounds.timeit_run import device_of

    check_result_name(LOADING, arguments.v, names)
    name = arguments.loader or _only_loader(names)
    found = named_loader(names, name, LOADING)
    step, against = _step_with(names, session, arguments.step, found)
    asked = f" --step {arguments.step}" if arguments.step else ""
    tuner = LoaderTuner(
        step, found, device_of(step), arguments.budget,
        name=name, against=against,
        command=f"{LOADING} {name}{asked}",
    )  # fmt: skip
    measured(tuner, "loading", names, arguments.v, lambda result: result.loader)


def _only_loader(names: Names) -> str:
    found = list(loaders(names))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{LOADING}: which one? {', '.join(found)}")
    raise UsageError(f"{LOADING}: there is no DataLoader in this notebook yet: make one first")


def _step_with(names: Names, session: Session, name: str | None, loader: Any) -> tuple[Step, str]:
    """The function that is named; the last cell, where it goes through this loader; or nothing."""
    from speedkit_jupyter.loading.api import step_over

    if name is not None:
        return step_over(loader, find_function(names, name, LOADING)), name
    if session.measured is not None:
        step = session.measured.step()
        if any(value is loader for value in step.walk().found.values()):
            return step, session.measured.title
    return step_over(loader), ""


def _loader_options(parser: Parser) -> None:
    about = "your DataLoader; without it the only one"
    parser.option("loader", "LOADER", about, suggestions.loaders, nargs="?")
    add_step(
        parser,
        "a function that takes a batch, or goes through the loader; without it the last "
        "%%speedbench cell where that does, else loading alone",
    )
    add_budget(parser, "for all of it (20)")
    add_result(parser, "the variable that the rebuilt loader gets")


@lets_go
def batch(names: Names, session: Session, arguments: Namespace) -> None:
    """Measure batch size by batch size."""
    __tracebackhide__ = True
    check_result_name(BATCHES, arguments.v, names)
    measured(_sweep(names, session, arguments), "batches", names, arguments.v)


def _sweep(names: Names, session: Session, arguments: Namespace) -> Sweep:
    """The sweep of the function that is named, or of the last cell."""
    from speedkit_jupyter.batching.api import sweep_of, sweep_of_step

    sizes, budget_s = arguments.range, arguments.budget
    loader, data = named_loader(names, arguments.loader, BATCHES), _batch(names, arguments.data)
    if arguments.step is not None:
        function = find_function(names, arguments.step, BATCHES)
        command = f"{BATCHES} --step {arguments.step}"
        return sweep_of(function, data, loader, sizes, budget_s, command)
    cell = _last_cell(session, BATCHES)
    return sweep_of_step(cell.step(), loader, cell.title, sizes, budget_s, BATCHES, data or ())


def _batch(names: Names, words: list[str] | None) -> Any:
    """What `--data` names: a tuple, an argument each."""
    if not words:
        return None
    known = [n for n, value in names.items() if n[:1] != "_" and length_of(value) is not None]
    try:
        return tuple(value_of(names, word, known, "variable") for word in words)
    except SpeedKitError as error:
        raise UsageError(f"{BATCHES}: {error}") from None


def _sizes(text: str) -> tuple[int, int]:
    """From the smallest to the largest: `8:4096`."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is no range of sizes: give one as in 8:4096")
    return int(least), int(most)


def _batch_options(parser: Parser) -> None:
    add_step(
        parser, "a function that takes a batch, or reads its tensors; without it the last cell"
    )
    data = "the batch that it takes, or the tensors that it reads by name, with commas: x,y"
    parser.option("--data", "NAMES", data, type=names_of)
    about = "the DataLoader whose batches it takes, or goes through"
    parser.option("--loader", "NAME", about, suggestions.loaders)
    sizes = "the smallest and the largest size (8:4096); each is twice the one before"
    parser.option("--range", "SIZES", sizes, type=_sizes, default=(8, 4096))
    add_budget(parser, "for all of it (20)")
    add_result(parser)


@lets_go
def verify(names: Names, session: Session, arguments: Namespace) -> None:
    """Train with and without a plan, and show the curves."""
    __tracebackhide__ = True
    from speedkit_jupyter.tuning.api import verifier_of

    check_result_name(VERIFYING, arguments.v, names)
    accuracy = accuracy_of(names, arguments, VERIFYING)
    step, number, title = _trained(names, session, arguments, accuracy)
    verifier = verifier_of(step, arguments.plan or _plan(session, step), number, accuracy)
    verifier.result().subject = subject = _subject(session, step, title)
    measured(verifier, f"verifying {subject}".replace("`", ""), names, arguments.v)


def _trained(
    names: Names, session: Session, arguments: Namespace, accuracy: NamedAccuracy | None
) -> tuple[Step, int, str]:
    """The step, how often it is called, and its name.

    Where there is none but an accuracy, that is all that is run.
    """
    from speedkit_jupyter.measure.subject.from_function import step_of
    from speedkit_jupyter.measure.subject.named_accuracy import required

    name = arguments.step
    if accuracy is not None and name in (None, accuracy.name) and (name or not session.measured):
        models = [find_model(names, None)[1]] if required(accuracy.function) else []
        return step_of(accuracy.bound(models)), 0, accuracy.name
    if name is not None:
        return step_of(find_function(names, name, VERIFYING)), arguments.steps, name
    cell = _last_cell(session, VERIFYING)
    return cell.step(), arguments.steps, cell.title


def _subject(session: Session, step: Step, title: str) -> str:
    """What the curves are of: `model` in `train_step`; a model without a name is `a GAN`, say."""
    held = {id(model): word for word, model in inside_others(session.names or {}).items()}
    names = [session.name_of(model, held.get(id(model), "")) for model in step.models]
    words = zip(names, step.models, strict=True)
    spoken = (f"`{word}`" if word else f"a {type(model).__name__}" for word, model in words)
    return f"{' and '.join(spoken)} in `{title}`"


def _plan(session: Session, step: Step) -> Any:
    """What was tuned last, else what is in force, was learned, or what the rules would do."""
    from speedkit_jupyter.measure.subject.variants import AUTO, CURRENT
    from speedkit_jupyter.plans.applying import plan_applied_to
    from speedkit_jupyter.tuning import learning

    if not step.models:
        return AUTO
    if (found := session.found_for(step.models[0])) and found.is_newer and found.proof:
        return found.config
    if any(plan_applied_to(model) is not None for model in step.models):
        return CURRENT
    return learning.tuned(step.models, step.optimizers) or AUTO


def _verify_options(parser: Parser) -> None:
    calls = "how often each run calls the step (50)"
    parser.option("--steps", "NUMBER", calls, type=whole_number, default=50)
    add_step(parser)
    plan = "a plan as for --compare; without it what was tuned, applied or learned, or the rules'"
    parser.option("--plan", "NAME", plan, suggestions.plans)
    add_accuracy(parser)
    add_result(parser)


ADVISE = Command(
    "advise", "what would make a step faster: evidence, expected gain, risk", advise,
    _advise_options,
)  # fmt: skip
LOADER = Command(
    "loader", "the fastest settings of a DataLoader, measured with your step", loader,
    _loader_options,
)  # fmt: skip
BATCH = Command(
    "batch", "samples a second and peak memory by batch size: knee, fastest, largest", batch,
    _batch_options,
)  # fmt: skip
VERIFY = Command(
    "verify", "train with and without a plan, and compare the loss curves", verify, _verify_options
)
