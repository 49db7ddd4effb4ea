"""%speedkit advise."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from IPython.display import display

from speedkit_jupyter.extras.advise.advisor import Advised, Advisor
from speedkit_jupyter.extras.advise.trainer import TrainerAdvisor, is_trainer
from speedkit_jupyter.extras.profile.profiler import Profiler, models_of
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans import naming
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.step.step import Step, over_batches, step_of
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.weak import at_unload


@command(
    "reasons why a step is slow: evidence, expected gain, risk",
    options.MODEL,
    options.step("the function to examine (default: the last %%speedbench cell)"),
    options.LOADER,
    Option("--try", "NUMBER", "measure this opportunity, or a rule's", dest="wanted"),
    options.budget(f"total budget in seconds ({DEFAULT_BUDGET_S:g})"),
    options.RESULT,
)
def advise(names: Names, session: Session, arguments: Namespace) -> None:
    if is_trainer(trainer := names.get(arguments.model)):
        command = f"%speedkit advise {arguments.model}"
        advisor = TrainerAdvisor(trainer, arguments.budget, command)
        measured(advisor, "trying arguments", names, arguments.v)
        display(advisor.advice())
        return
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
    name, words, wanted = arguments.step, namespace.names_of_models(names), arguments.model
    model = wanted and [*namespace.find_models(names, wanted).values()]
    make_step: Callable[[], Step]
    if name is None:
        cell = session.last_cell()
        make_step, text, subject = cell.step, cell.command, cell.title
        if model and len(model) == 1:
            make_step = lambda: cell.step().on(model[0])  # noqa: E731
    else:
        words = models_of(_epoch_of(names, name, arguments.loader)) | words
        text, subject = f"%speedkit advise --step {name}", name
        # Looked up again for --try.
        make_step = lambda: step_of(_epoch_of(names, name, arguments.loader), model)  # noqa: E731
    profiler = Profiler(make_step(), arguments.budget, text, words)
    called = {id(value): word for word, value in names.items() if word[:1] != "_"}
    loader = namespace.find_loader(names, arguments.loader)
    advisor = Advisor(profiler, called, [] if loader is None else [loader], subject)
    variable = None if arguments.wanted else arguments.v
    found = measured(advisor, "looking for slow parts", names, variable).opportunities
    return Advised(list(found), make_step, asked)


def _epoch_of(names: Names, name: str, loader: str | None) -> Any:
    function, given = namespace.find_function(names, name), namespace.find_loader(names, loader)
    return over_batches(function, given, name, "name its DataLoader by --loader")


def is_unloaded(model: Any) -> bool:
    """Return whether peft has taken the adapters out of this model, as `merge_and_unload` does."""
    tuner: Any = getattr(model, "base_model", None)
    return hasattr(type(tuner), "merge_and_unload") and not hasattr(tuner.model, "peft_config")


def watch(shell: Any) -> None:
    """Say once, after a cell, that a plan does not act on the model that peft has returned."""
    told = WeakSet[Any]()

    def after_cell(result: Any = None) -> None:
        for name, context in naming.applied(shell.user_ns):
            if context.model not in told and is_unloaded(context.model):
                told.add(context.model)
                messages.important(
                    f"The plan of {name} does not act on the model that peft returned without "
                    f"adapters: %speedkit restore {name}, then %speedkit apply the returned model"
                )

    def end() -> None:
        with suppress(ValueError):
            shell.events.unregister("post_run_cell", after_cell)

    shell.events.register("post_run_cell", after_cell)
    at_unload(end)


PLUGIN = Plugin([advise], begin=watch)
