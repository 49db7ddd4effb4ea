"""The subcommands of `%speedkit`, in the order of help; the line that names one; and help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import cache

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.notebook import options, plugins, speedbench
from speedkit_jupyter.notebook.commands import plans, results
from speedkit_jupyter.notebook.options import Command, Names, Option
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

CORE = (
    *(plans.status, plans.report, plans.apply, plans.restore, results.verify),
    *(results.compile, results.tuned, plans.catalog, plans.explain, plans.code, plans.panel),
    *(results.history, results.cache),
)


@cache
def commands() -> dict[str, Command]:
    """Return all subcommands by name: of the core, of extras, and help."""
    extras = [one for plugin in plugins.plugins() for one in plugin.commands]
    known = {entry.name: entry for entry in (*CORE, *extras)}
    topics = (*known, "help", SPEEDBENCH)
    topic = Option("topic", "TOPIC", "one of them; without it all", nargs="?", choices=topics)
    return known | {"help": options.command("this page", topic)(help)}


def cells() -> dict[str, Callable[..., None]]:
    """Return the functions that run `%%speedkit` cells, by the name of the subcommand."""
    return {name: run for plugin in plugins.plugins() for name, run in plugin.cells.items()}


def selected(line: str, default: str = "status") -> tuple[Command, str]:
    """Return the command of a `%speedkit` line and the rest of the line; raises UsageError."""
    line = options.without_comment(line).strip()
    typed = options.split(line)
    name = typed[0] if typed and not typed[0].startswith("-") else default
    if name not in commands():
        hint = did_you_mean(name, commands())
        raise UsageError(f"unknown subcommand {name!r}.{hint} See %speedkit help")
    return commands()[name], line.removeprefix(name)


def cell_command(name: str) -> Callable[..., None]:
    """Return the function that runs a `%%speedkit` cell of that name; raises UsageError."""
    if name not in cells():
        raise UsageError(f"{name} takes no cell: write %speedkit {name}")
    return hide_internal_frames(cells()[name])


# --- help ---

TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPEEDBENCH = "speedbench"
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}


def help_page(topic: str | None = None) -> Document:
    """Return all subcommands and options, or the options of one."""

    def described(topic: str) -> Table:
        parser = speedbench.parser() if topic == SPEEDBENCH else commands()[topic]
        return Table(("option", "what it does"), parser.described(), wraps=("option",))

    names = {name: f"%speedkit {name}" for name in commands()} | {SPEEDBENCH: "%%speedbench"}
    names |= {name: f"%%speedkit {name}" for name in cells()}
    magics = {names[name]: entry.summary for name, entry in commands().items()} | BENCHES
    for mode in plugins.modes():
        magics |= mode.about
    if topic is not None:
        body = described(topic) or "It has no options."
        return Document(f"{names[topic]}: {magics[names[topic]]}", [body])
    every = [Section(described(name), names[name]) for name in (SPEEDBENCH, *commands())]
    return Document(TITLE, [Table(("magic", "what it does"), [*magics.items()]), *every])


def help(names: Names, session: Session, arguments: Namespace) -> None:
    display(help_page(arguments.topic))
