"""%speedkit history: saved benchmarks."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import offer
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.history_report import history_list, history_report
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.words import count


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """All names, or one and how its newest result compares."""
    skipped: list[str] = []
    if arguments.name is None:
        if arguments.forget:
            raise UsageError("%speedkit history --forget: which NAME?")
        display(history_list(database.saved(skipped=skipped)).and_lines(skipped))
        return
    if arguments.forget and (number := database.forget(arguments.name)):
        display(Document(f"Deleted {count(number, 'result')} of {arguments.name}"))
        return
    kept = database.saved(arguments.name, skipped)
    if not (kept or skipped):
        keys = list(dict.fromkeys(entry.name for entry in database.saved()))
        hint = did_you_mean(arguments.name, keys)
        raise UsageError(f"%speedkit history: nothing is saved as {arguments.name!r}.{hint}")
    nothing = Document(f"{arguments.name}: no result that can be read")
    display((history_report(kept) if kept else nothing).and_lines(skipped))


def _arguments(parser: Parser) -> None:
    name = "what was given to %%speedbench --save; without it all names"
    offer(parser.add_argument("name", nargs="?", metavar="NAME", help=name), suggestions.saved)
    parser.add_argument("--forget", action="store_true", help="delete what has this name")


COMMAND = Command(
    "history",
    "saved benchmarks, and how the newest compares with those before it",
    run,
    _arguments,
)
