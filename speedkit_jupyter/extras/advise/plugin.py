"""The magic `%speedkit advise`, and its option `--try`, which measures an opportunity."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from IPython.display import display

from speedkit_jupyter.extras.advise.advisor import Advised, Advisor
from speedkit_jupyter.extras.profile.profiler import Profiler
from speedkit_jupyter.extras.trainer_arguments.trainer import TrainerAdvisor, is_trainer
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.options import Names, Option, command
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.progress import run_and_show
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.step.step import Step, over_batches, step_of


@command(
    "reasons why a step is slow: evidence, expected gain, risk",
    options.MODEL,
    options.step("the function to examine (default: the last %%speedbench cell)"),
    options.LOADER,
    Option("--try", "NUMBER", "measure this opportunity, or a rule's", dest="wanted"),
    options.budget(f"seconds in all ({DEFAULT_BUDGET_S:g}; of a Trainer {6 * DEFAULT_BUDGET_S:g})"),
    options.RESULT,
)
def advise(names: Names, session: Session, arguments: Namespace) -> None:
    if is_trainer(trainer := names.get(arguments.model)):
        budget_s = arguments.budget or 6 * DEFAULT_BUDGET_S  # a Trainer's steps are often long
        advisor = TrainerAdvisor(trainer, budget_s, f"%speedkit advise {arguments.model}")
        try:
            run_and_show(advisor, "trying arguments", names, arguments.v)
        except KeyboardInterrupt:
            display(advisor.advice())
            raise
        display(advisor.advice())
        return
    asked, last = (arguments.step, arguments.model, arguments.loader), session.last_advice
    is_known = last is not None and (last.asked == asked or not any(asked))
    if not (arguments.wanted and is_known):
        last = session.last_advice = _advised(names, session, arguments, asked)
    if arguments.wanted:
        text = f"%speedkit advise --try {arguments.wanted}"
        trial = last.benchmark(arguments.wanted, arguments.budget, text)
        run_and_show(trial, "trying", names, arguments.v)


def _advised(names: Names, session: Session, arguments: Namespace, asked: Any) -> Advised:
    name, word = arguments.step, arguments.model
    model = word and [*namespace.find_models(names, word).values()]
    make_step: Callable[[], Step]  # called again by --try
    if name is None:
        cell = session.last_cell()
        make_step, text, subject = cell.step, cell.command, cell.title
        if model:
            make_step = lambda: cell.step().on(*model)  # noqa: E731
    else:
        make_step = lambda: step_of(_epoch_of(names, name, arguments.loader), model)  # noqa: E731
        text, subject = f"%speedkit advise --step {name}", name
    namespace.find_loader(names, arguments.loader)  # without --step, this only checks the name
    advisor = Advisor(Profiler(make_step(), arguments.budget, text), subject)
    variable = None if arguments.wanted else arguments.v
    found = run_and_show(advisor, "looking for slow parts", names, variable).opportunities
    return Advised(list(found), make_step, asked)


def _epoch_of(names: Names, name: str, loader: str | None) -> Any:
    function, given = namespace.find_function(names, name), namespace.find_loader(names, loader)
    return over_batches(function, given, name, "name its DataLoader by --loader")


PLUGIN = Plugin([advise])
