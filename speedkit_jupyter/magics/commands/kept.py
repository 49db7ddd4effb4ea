"""%speedkit config, tuned, history: what is kept, in the session and on disk."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Command, Names, Parser
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Section
from speedkit_jupyter.report.history_report import history_list, history_report
from speedkit_jupyter.report.tuning_report import tuned_list
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.words import count


def config(names: Names, session: Session, arguments: Namespace) -> None:
    """Show, load, save or reset what apply starts from."""
    action, file = arguments.action, arguments.file
    if action in ("load", "save") and not file:
        raise UsageError(f"%speedkit config {action}: which FILE?")
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
    display(Document(headline, (Section(body),), session.config.to_dict()))


def _config_options(parser: Parser) -> None:
    about, choices = (
        "what to do with what apply starts from (show)",
        ("show", "load", "save", "reset"),
    )
    parser.option("action", "ACTION", about, nargs="?", choices=choices, default="show")
    parser.option("file", "FILE", "a YAML file, for load and save", suggestions.configs, nargs="?")


def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    """List the plans that tuning has learned, or forget one."""
    skipped: list[str] = []
    which = arguments.which
    if arguments.action == "list":
        if which:
            raise UsageError(f"%speedkit tuned list takes no more words, not {which!r}")
        display(tuned_list(database.learned(skipped=skipped)).and_lines(skipped))
        return
    if which is None:
        raise UsageError("%speedkit tuned forget: which NUMBER? (or all; %speedkit tuned lists)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 10 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"%speedkit tuned forget: there is no plan {which}; %speedkit tuned lists")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


def _tuned_options(parser: Parser) -> None:
    about, choices = "show them or drop one (list)", ("list", "forget")
    parser.option("action", "ACTION", about, nargs="?", choices=choices, default="list")
    parser.option(
        "which", "NUMBER", "for forget: its number, or all", suggestions.learned, nargs="?"
    )


def history(names: Names, session: Session, arguments: Namespace) -> None:
    """List the names of saved benchmarks, or show one and how its newest result compares."""
    skipped: list[str] = []
    name = arguments.name
    if name is None:
        if arguments.forget:
            raise UsageError("%speedkit history --forget: which NAME?")
        display(history_list(database.saved(skipped=skipped)).and_lines(skipped))
        return
    if arguments.forget and (number := database.forget(name)):
        display(Document(f"Deleted {count(number, 'result')} of {name}"))
        return
    kept = database.saved(name, skipped)
    if not (kept or skipped):
        hint = did_you_mean(name, list(dict.fromkeys(one.name for one in database.saved())))
        raise UsageError(f"%speedkit history: nothing is saved as {name!r}.{hint}")
    nothing = Document(f"{name}: no result that can be read")
    display((history_report(kept) if kept else nothing).and_lines(skipped))


def _history_options(parser: Parser) -> None:
    about = "what was given to %%speedbench --save; without it all names"
    parser.option("name", "NAME", about, suggestions.saved, nargs="?")
    parser.switch("--forget", "delete what has this name")


CONFIG = Command("config", "show, load or save the session's config", config, _config_options)
TUNED = Command(
    "tuned",
    "the plans that tuning has learned; tuned forget NUMBER drops one",
    tuned,
    _tuned_options,
)
HISTORY = Command(
    "history", "saved benchmarks, and how the newest compares with those before it", history,
    _history_options,
)  # fmt: skip
