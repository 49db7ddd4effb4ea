"""%speedkit config, tuned, history, compile, cache, verbosity."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.machines import compile_archive
from speedkit_jupyter.notebook import options, watch
from speedkit_jupyter.notebook.options import Names, Option, command, switch
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report import compile_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import CodeBlock
from speedkit_jupyter.report.tuning_report import (
    cache_report,
    history_list,
    history_report,
    tuned_list,
)
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.units import count, size

ACTIONS = {
    "show": "This session's config; `%speedkit apply` starts from it",
    "load": "Loaded {}; `%speedkit apply` starts from it",
    "save": "Saved to {}",
    "reset": "Everything is auto again",
}

TRUST = "Compiled code runs as soon as it is loaded: import only what you exported yourself."


@command(
    "show, load or save the session's config",
    options.action(*ACTIONS),
    Option("file", "FILE", "a YAML file, for load and save", options.configs, nargs="?"),
)
def config(names: Names, session: Session, arguments: Namespace) -> None:
    action, file = arguments.action, arguments.file
    if action in ("load", "save") and not file:
        raise UsageError(f"{action}: which FILE?")
    if action == "load":
        session.config = SpeedConfig.from_yaml(file)
    if action == "reset":
        session.reset()
    if action == "save":
        try:
            session.config.to_yaml(file)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
    headline = ACTIONS[action].format(file)
    display(Document(headline, [CodeBlock(session.config.to_yaml().rstrip())]))


@command(
    "the plans that tuning has learned; tuned forget NUMBER drops one",
    options.action("list", "forget"),
    Option("which", "NUMBER", "for forget: its number, or all", words=("all",), nargs="?"),
)
def tuned(names: Names, session: Session, arguments: Namespace) -> None:
    which, skipped = arguments.which, list[str]()
    if arguments.action == "list":
        display(tuned_list(database.learned(skipped=skipped)).and_lines(skipped))
        return
    if which is None:
        raise UsageError("forget: which NUMBER? (or all; %speedkit tuned lists them)")
    numbers = [int(which)] if which.isdecimal() and len(which) < 19 else []
    number = database.unlearn(None if which == "all" else numbers)
    if not number and which != "all":
        raise UsageError(f"forget: there is no plan {which:.20}; %speedkit tuned lists them")
    display(Document(f"Forgot {count(number, 'learned plan')}"))


@command(
    "saved benchmarks",
    Option(
        "name", "NAME", "the name of %%speedbench --save; without it all", options.saved, nargs="?"
    ),
    switch("--forget", "delete what has this name"),
)
def history(names: Names, session: Session, arguments: Namespace) -> None:
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
        raise UsageError(f"nothing is saved as {name!r}.{did_you_mean(name, options.saved(names))}")
    nothing = Document(f"{name}: no result that can be read")
    display((history_report(kept) if kept else nothing).and_lines(skipped))


# --- compiled code ---


@command("the work of torch.compile in this session: seconds, graph breaks, recompiles")
def compile(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the history; nothing that is compiled is reset by it."""
    watch.history().collect()
    display(compile_report.history_report(watch.history()))


@command(
    "the kept compiled code; export FILE and import FILE take it along",
    options.action("status", "clear", "export", "import"),
    Option("file", "FILE", "for export and import", nargs="?"),
)
def cache(names: Names, session: Session, arguments: Namespace) -> None:
    """Show or delete the compiled code, or write it to a file and take it from there."""
    action, file = arguments.action, arguments.file
    if action in ("export", "import"):
        if not file:
            raise UsageError(f"{action}: which FILE?")
        does = compile_archive.save if action == "export" else compile_archive.load
        files, plans = does(file)
        what = f"{count(files, 'file')} of compiled code and {count(plans, 'learned plan')}"
        words = {"export": f"Saved {what} to {file}", "import": f"Took over {what} from {file}"}
        display(Document(words[action], [TRUST] if action == "export" else []))
    elif action == "clear":
        files, freed = compile_archive.clear()
        display(Document(f"Deleted {count(files, 'file')} of compiled code ({size(freed)})"))
    else:
        display(cache_report())


# --- verbosity ---

LEVELS = {
    "quiet": "warnings alone, and no progress",
    "normal": "notes, warnings and progress",
    "debug": "everything",
}


@command(
    "which messages are shown next to results",
    Option("level", "LEVEL", "without it: as it is", nargs="?", choices=tuple(messages.LEVELS)),
)
def verbosity(names: Names, session: Session, arguments: Namespace) -> None:
    if arguments.level is not None:
        messages.choose(arguments.level)
    level = messages.verbosity()
    display(Document(f"Verbosity {level}: {LEVELS[level]}"))
