"""%speedkit config, tuned, history: what is kept, in the session and on disk."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics.line import Names, Option, command, switch
from speedkit_jupyter.magics.options import configs, saved
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code
from speedkit_jupyter.report.history_report import history_list, history_report, tuned_list
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.words import count

ACTIONS = ("show", "load", "save", "reset")


@command(
    "show, load or save the session's config",
    Option("action", "ACTION", "(show)", nargs="?", choices=ACTIONS, default="show"),
    Option("file", "FILE", "a YAML file, for load and save", configs, nargs="?"),
)
def config(names: Names, session: Session, arguments: Namespace) -> None:
    """Show, load, save or reset what apply starts from."""
    action, file = arguments.action, arguments.file
    if action in ("load", "save") and not file:
        raise UsageError(f"{action}: which FILE?")
    if action in ("load", "reset"):
        session.config = SpeedConfig.from_yaml(file) if action == "load" else SpeedConfig()
    if action == "save":
        try:
            session.config.to_yaml(file)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
    headline = {
        "show": "This session's config; `%speedkit apply` starts from it",
        "load": f"Loaded {file}; `%speedkit apply` starts from it",
        "reset": "Everything is auto again",
        "save": f"Saved to {file}",
    }[action]
    body = Code(session.config.to_yaml().rstrip())
    display(Document(headline, [body]))


@command(
    "the plans that tuning has learned; tuned forget NUMBER drops one",
    Option("action", "ACTION", "(list)", nargs="?", choices=("list", "forget"), default="list"),
    Option("which", "NUMBER", "for forget: its number, or all", words=("all",), nargs="?"),
)
def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    """List the plans that tuning has learned, or forget one."""
    which, skipped = arguments.which, list[str]()
    if arguments.action == "list":
        display(tuned_list(database.learned(skipped=skipped)).and_lines(skipped))
        return
    if which is None:
        raise UsageError("forget: which NUMBER? (or all; %speedkit tuned lists them)")
    numbers = [int(which)] if which.isdecimal() else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"forget: there is no plan {which}; %speedkit tuned lists them")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


@command(
    "saved benchmarks",
    Option("name", "NAME", "that of %%speedbench --save; without it all", saved, nargs="?"),
    switch("--forget", "delete what has this name"),
)
def history(names: Names, session: Session, arguments: Namespace) -> None:
    """List the names of saved benchmarks, or show one and how its newest result compares."""
    name, skipped = arguments.name, list[str]()
    if name is None:
        if arguments.forget:
            raise UsageError("--forget: which NAME?")
        display(history_list(database.saved(skipped=skipped)).and_lines(skipped))
        return
    if arguments.forget and (number := database.forget(name)):
        display(Document(f"Deleted {count(number, 'result')} of {name}"))
        return
    kept = database.saved(name, skipped)
    if not (kept or skipped):
        raise UsageError(f"nothing is saved as {name!r}.{did_you_mean(name, saved(names))}")
    nothing = Document(f"{name}: no result that can be read")
    display((history_report(kept) if kept else nothing).and_lines(skipped))
