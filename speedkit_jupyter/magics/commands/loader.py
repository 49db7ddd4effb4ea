"""%speedkit loader: the settings of a DataLoader that are fastest with a step."""

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
    loaders,
    named_loader,
)
from speedkit_jupyter.magics.options import offer, seconds
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from speedkit_jupyter.loading.tuner import LoaderTuner
    from speedkit_jupyter.measure.subject.step import Step

COMMAND_NAME = "%speedkit loader"


@lets_go
def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Measure it. Ctrl-C shows what is known and stops the notebook."""
    __tracebackhide__ = True
    check_result_name(COMMAND_NAME, arguments.v, names)
    tuner = _tuner(names, session, arguments)
    with ProgressLine("loading") as progress:
        try:
            with closing(tuner.run()) as states:
                for state in states:
                    progress.show(state)
        except KeyboardInterrupt:
            if tuner.has_results():
                progress.replace(tuner.result())
            raise KeyboardInterrupt(STOPPED) from None
        progress.replace(tuner.result())
    if arguments.v:
        names[arguments.v] = tuner.result().loader


def _tuner(names: Names, session: Session, arguments: Namespace) -> LoaderTuner:
    from speedkit_jupyter.loading.tuner import LoaderTuner
    from speedkit_jupyter.measure.rounds.timeit_run import device_of

    name = arguments.loader or _only(names)
    loader = named_loader(names, name, COMMAND_NAME)
    step, against = _step(names, session, arguments, loader)
    return LoaderTuner(
        step, loader, device_of(step), arguments.budget,
        keep=not arguments.no_keep, any_order=arguments.any_order, name=name, against=against,
        command=f"{COMMAND_NAME} {name}{f' --step {arguments.step}' if arguments.step else ''}",
    )  # fmt: skip


def _only(names: Names) -> str:
    found = list(loaders(names))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{COMMAND_NAME}: which one? {', '.join(found)}")
    raise UsageError(f"{COMMAND_NAME}: there is no DataLoader in this notebook yet: make one first")


def _step(names: Names, session: Session, arguments: Namespace, loader: Any) -> tuple[Step, str]:
    """The function that is named; the last cell, where it goes through this loader; or nothing."""
    from speedkit_jupyter.loading.api import step_over

    if arguments.step is not None:
        function = find_function(names, arguments.step, COMMAND_NAME)
        return step_over(loader, function), arguments.step
    if session.measured is not None:
        step = session.measured.step()
        if any(value is loader for value in step.walk().found.values()):
            return step, session.measured.title
    return step_over(loader), ""


def _arguments(parser: Parser) -> None:
    about = "your DataLoader; without it the only one"
    action = parser.add_argument("loader", nargs="?", metavar="LOADER", help=about)
    offer(action, suggestions.loaders)
    step = (
        "a function that takes a batch, or goes through the loader; without it the last "
        "%%speedbench cell where that does, else loading alone"
    )
    offer(parser.add_argument("--step", metavar="NAME", help=step), suggestions.functions)
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="for all of it (20)")
    keep = "keep no samples in memory"
    parser.add_argument("--no-keep", action="store_true", help=keep)
    order = "also settings that give the same samples in another order"
    parser.add_argument("--any-order", action="store_true", help=order)
    parser.add_argument("-v", metavar="NAME", help="the variable that the rebuilt loader gets")


COMMAND = Command(
    "loader", "the fastest settings of a DataLoader, measured with your step", run, _arguments
)
