"""%speedkit batch: samples a second and peak memory, batch size by batch size."""

from __future__ import annotations

import argparse
from argparse import Namespace
from contextlib import closing
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.errors import STOPPED
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import check_result_name, find_function, named_loader
from speedkit_jupyter.magics.options import names as split_names
from speedkit_jupyter.magics.options import offer, seconds
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import value_of
from speedkit_jupyter.support.samples import length_of
from speedkit_jupyter.support.tracebacks import lets_go

if TYPE_CHECKING:
    from speedkit_jupyter.batching.sweep import Sweep

LINE = "%speedkit batch"


@lets_go
def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Measure. Ctrl-C shows what is known and stops the notebook."""
    __tracebackhide__ = True
    check_result_name(LINE, arguments.v, names)
    sweep = _sweep(names, session, arguments)
    with ProgressLine("batches") as progress:
        try:
            with closing(sweep.run()) as states:
                for state in states:
                    progress.show(state)
        except KeyboardInterrupt:
            if sweep.has_results():
                progress.replace(sweep.result())
            raise KeyboardInterrupt(STOPPED) from None
        progress.replace(sweep.result())
    if arguments.v:
        names[arguments.v] = sweep.result()


def _sweep(names: Names, session: Session, arguments: Namespace) -> Sweep:
    """Of the function that is named, or of the last cell."""
    from speedkit_jupyter.batching.api import sweep_of, sweep_of_step

    given = arguments.loader
    loader = None if given is None else named_loader(names, given, LINE)
    if arguments.step is not None:
        function = find_function(names, arguments.step, LINE)
        batch = _batch(names, arguments.data)
        command = f"{LINE} --step {arguments.step}"
        return sweep_of(function, batch, loader, arguments.range, arguments.budget, command)
    if session.measured is None:
        raise UsageError(
            f"{LINE}: which step? Run a %%speedbench cell before, or name a function: --step "
            "train_step"
        )
    measured, batch = session.measured, _batch(names, arguments.data) or ()
    return sweep_of_step(
        measured.step(), loader, measured.title, arguments.range, arguments.budget, LINE, batch
    )


def _batch(names: Names, words: list[str] | None) -> Any:
    """What `--data` names; a tuple, an argument each."""
    if not words:
        return None
    try:
        return tuple(value_of(names, word, _batches(names), "variable") for word in words)
    except SpeedKitError as error:
        raise UsageError(f"{LINE}: {error}") from None


def _batches(names: Names) -> list[str]:
    """The user's names of what can be a batch, to choose from."""
    return [
        name
        for name, value in names.items()
        if not name.startswith("_") and length_of(value) is not None
    ]


def sizes(text: str) -> tuple[int, int]:
    """From the smallest to the largest: `8:4096`."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is no range of sizes: give one as in 8:4096")
    return int(least), int(most)


def _arguments(parser: Parser) -> None:
    step = "a function that takes a batch, or reads its tensors; without it the last cell"
    offer(parser.add_argument("--step", metavar="NAME", help=step), suggestions.functions)
    data = "the batch that it takes, or the tensors that it reads by name, with commas: x,y"
    parser.add_argument("--data", type=split_names, metavar="NAMES", help=data)
    loader = "the DataLoader whose batches it takes, or goes through"
    offer(parser.add_argument("--loader", metavar="NAME", help=loader), suggestions.loaders)
    sizes_help = "the smallest and the largest size (8:4096); each is twice the one before"
    parser.add_argument("--range", type=sizes, default=(8, 4096), metavar="SIZES", help=sizes_help)
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="for all of it (20)")
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")


COMMAND = Command(
    "batch",
    "samples a second and peak memory by batch size: knee, fastest, largest",
    run,
    _arguments,
)
