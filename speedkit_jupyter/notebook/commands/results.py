"""%speedkit tuned and cache: learned plans and compiled code."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.options import Names, Option, command
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.report.tuning_report import cache_report, tuned_list
from speedkit_jupyter.support import database
from speedkit_jupyter.support.units import count, size


@command(
    "the plans that tuning has learned; `tuned forget NUMBER` deletes one",
    options.action("list", "forget"),
    Option("which", "NUMBER", "for forget: the plan's number, or all", words=("all",), nargs="?"),
)
def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    which = arguments.which
    if arguments.action == "list":
        display(tuned_list(database.learned()))
        return
    if which is None:
        raise UsageError("forget: which NUMBER? (or all; %speedkit tuned lists them)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 19 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"forget: there is no plan {which:.20}; %speedkit tuned lists them")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


@command("the compiled code that is stored between sessions", options.action("status", "clear"))
def cache(names: Names, session: Session, arguments: Namespace) -> None:
    """Show or delete the compiled code."""
    if arguments.action == "clear":
        display(Document(f"Deleted {size(compile_cache.clear())} of compiled code"))
    else:
        display(cache_report())
