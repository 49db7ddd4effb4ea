"""%speedkit tuned: the plans that tuning has learned."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import offer
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.tuning_report import tuned_list
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import database
from speedkit_jupyter.support.words import count


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """List them, or forget one."""
    skipped: list[str] = []
    if arguments.action == "list":
        if arguments.which:
            raise UsageError(f"%speedkit tuned list takes no more words, not {arguments.which!r}")
        display(tuned_list(database.learned(skipped=skipped)).and_lines(skipped))
        return
    which = arguments.which
    if which is None:
        raise UsageError("%speedkit tuned forget: which NUMBER? (or all; %speedkit tuned lists)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 10 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"%speedkit tuned forget: there is no plan {which}; %speedkit tuned lists")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


def _arguments(parser: Parser) -> None:
    verb = "show them or drop one (list)"
    parser.add_argument(
        "action", nargs="?", choices=("list", "forget"), default="list", metavar="ACTION", help=verb
    )
    which = "for forget: its number, or all"
    offer(
        parser.add_argument("which", nargs="?", metavar="NUMBER", help=which), suggestions.learned
    )


COMMAND = Command(
    "tuned", "the plans that tuning has learned; tuned forget NUMBER drops one", run, _arguments
)
