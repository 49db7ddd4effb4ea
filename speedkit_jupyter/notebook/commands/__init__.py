"""The subcommands of `%speedkit`, in the order of help; the line that names one; and help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.extras.processes import plugin as processes
from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.commands import compiling, kept, plans, steps
from speedkit_jupyter.notebook.options import Command, Names, Option
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

COMMANDS: dict[str, Command] = {
    entry.name: entry
    for entry in (
        plans.status,
        plans.report,
        plans.apply,
        plans.restore,
        steps.advise,
        steps.loader,
        steps.batch,
        steps.verify,
        compiling.compile,
        compiling.autotune,
        kept.tuned,
        plans.catalog,
        plans.explain,
        plans.code,
        plans.panel,
        processes.processes,
        processes.launch,
        kept.history,
        kept.cache,
        kept.config,
        kept.free,
        kept.verbosity,
    )
}


def selected(line: str) -> tuple[Command, str]:
    """Return the command of a `%speedkit` line and the rest of the line; raises UsageError."""
    line = options.without_comment(line).strip()
    typed = options.split(line)
    name = typed[0] if typed and not typed[0].startswith("-") else "status"
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UsageError(f"unknown subcommand {name!r}.{hint} See %speedkit help")
    return COMMANDS[name], line.removeprefix(name)


def cell_command(name: str) -> Callable[..., None]:
    """Return what runs a `%%speedkit` cell of that name; raises UsageError."""
    if name not in processes.CELLS:
        raise UsageError(f"{name} takes no cell: write %speedkit {name}")
    return hide_internal_frames(processes.CELLS[name])


# --- help ---

TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPELLING = "An option with _ may have - there: --channels_last is --channels-last."
SPEEDBENCH = "speedbench"
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --profile": "where the time of a cell goes",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}
TOPICS = (*COMMANDS, "help", SPEEDBENCH)


def help_page(topic: str | None = None) -> Document:
    """Return all subcommands and options, or those of one."""

    def described(topic: str) -> Table:
        parser = options.speedbench_parser() if topic == SPEEDBENCH else COMMANDS[topic]
        return Table(("option", "what it does"), parser.described(), wraps=("option",))

    names = {name: f"%speedkit {name}" for name in COMMANDS} | {SPEEDBENCH: "%%speedbench"}
    names |= {name: f"%%speedkit {name}" for name in processes.CELLS}
    magics = {names[name]: entry.summary for name, entry in COMMANDS.items()} | BENCHES
    if topic is not None:
        body = described(topic) or "It has no options."
        return Document(f"{names[topic]}: {magics[names[topic]]}", [body])
    every = [Section(described(name), names[name]) for name in (SPEEDBENCH, *COMMANDS)]
    return Document(TITLE, [Table(("magic", "what it does"), [*magics.items()]), SPELLING, *every])


TOPIC = Option("topic", "TOPIC", "one of them; without it all", nargs="?", choices=TOPICS)


@options.command("this page", TOPIC)
def help(names: Names, session: Session, arguments: Namespace) -> None:
    display(help_page(arguments.topic))


COMMANDS["help"] = help
