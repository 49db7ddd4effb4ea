"""%speedkit advise: what would make a step faster, and what each of it brings when it is tried."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.errors import STOPPED
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import (
    check_result_name,
    find_function,
    find_model,
    models,
    named_loader,
)
from speedkit_jupyter.magics.options import add_model, offer, seconds, whole_number
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from speedkit_jupyter.profiling.profiler import Profiler


@lets_go
def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Advice, or with --try the comparison. Ctrl-C shows what is known and stops the notebook."""
    __tracebackhide__ = True
    check_result_name("%speedkit advise", arguments.v, names)
    engine = _engine(names, session, arguments)
    title = "trying" if arguments.wanted else "looking for what is slow"
    with ProgressLine(title) as progress:
        try:
            with closing(engine.run()) as states:
                for state in states:
                    progress.show(state)
        except KeyboardInterrupt:
            if engine.has_results():
                progress.replace(engine.result())
            raise KeyboardInterrupt(STOPPED) from None
        progress.replace(engine.result())
    if not arguments.wanted:
        _remember(names, session, arguments, engine)
    if arguments.v:
        names[arguments.v] = engine.result()


def _engine(names: Names, session: Session, arguments: Namespace) -> Any:
    """What the line asks for."""
    from speedkit_jupyter.advice.advisor import Advisor

    if arguments.wanted:
        if session.advised is None:
            raise UsageError("%speedkit advise --try: nothing was advised yet: %speedkit advise")
        command = f"%speedkit advise --try {arguments.wanted}"
        return session.advised.benchmark(arguments.wanted, arguments.budget, command)
    profiler, subject = _profiler(names, session, arguments)
    called = {id(value): name for name, value in names.items() if name[:1] != "_"}
    loaders = (
        []
        if arguments.loader is None
        else [named_loader(names, arguments.loader, "%speedkit advise")]
    )
    return Advisor(profiler, called, loaders, subject)


def _profiler(names: Names, session: Session, arguments: Namespace) -> tuple[Profiler, str]:
    """Of the function that is named, or of the last cell."""
    from speedkit_jupyter.profiling.api import profiler_of

    model = None if arguments.model is None else find_model(names, arguments.model)[1]
    if arguments.step is not None:
        function = _function(names, arguments.step, arguments.loader)
        command = f"%speedkit advise --step {arguments.step}"
        called = {id(value): name for name, value in models(names).items()}
        return (
            profiler_of(function, model, None, arguments.budget, command, called),
            arguments.step,
        )
    measured = session.measured
    if measured is None or measured.profiler is None:
        raise UsageError(
            "%speedkit advise: which step? Run a %%speedbench cell before, or name a function: "
            "--step train_step"
        )
    return measured.profiler(arguments.budget), measured.title


def _function(names: Names, name: str, loader: str | None) -> Any:
    """The one that is named; an epoch of the loader, where it takes batches."""
    from speedkit_jupyter.advice.api import over_batches

    function = find_function(names, name, "%speedkit advise")
    given = None if loader is None else named_loader(names, loader, "%speedkit advise")
    return over_batches(function, given, name, "name its DataLoader by --loader")


def _remember(names: Names, session: Session, arguments: Namespace, advisor: Any) -> None:
    """For --try; the step is made anew then, with what its names mean by that time."""
    from speedkit_jupyter.advice.trying import Advised
    from speedkit_jupyter.measure.subject.from_function import step_of

    name, loader, measured = arguments.step, arguments.loader, session.measured

    def step() -> Any:
        if name is not None:
            return step_of(_function(names, name, loader))
        assert measured is not None
        return measured.step()

    session.advised = Advised(list(advisor.result().opportunities), step)


def _wanted(text: str) -> int | str:
    return text if text.isidentifier() else whole_number(text)


def _arguments(parser: Parser) -> None:
    add_model(parser)
    step = "the function to look at; without it the last %%speedbench cell"
    parser.add_argument("--step", metavar="NAME", help=step)
    hidden = "its DataLoader, where the code hides it"
    offer(parser.add_argument("--loader", metavar="NAME", help=hidden), suggestions.loaders)
    trying = "measure the opportunity of this number or rule: the step with it and as it is"
    parser.add_argument("--try", type=_wanted, dest="wanted", metavar="NUMBER", help=trying)
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="for all of it (10)")
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")


COMMAND = Command(
    "advise", "what would make a step faster: evidence, expected gain, risk", run, _arguments
)
