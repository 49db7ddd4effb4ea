"""Find the subcommand that a `%speedkit` line names, and show help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import cache

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.notebook import options, plugins, speedbench
from speedkit_jupyter.notebook.commands import plans
from speedkit_jupyter.notebook.options import Command, Names, Option
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.elements import Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames

CORE = (
    *(plans.status, plans.report, plans.apply, plans.restore, plans.tuned),
    *(plans.catalog, plans.explain, plans.code, plans.panel, plans.cache),
)


@cache
def commands() -> dict[str, Command]:
    """Return all subcommands by name, including subcommands of extras."""
    extras = [one for plugin in plugins.plugins() for one in plugin.commands]
    known = {entry.name: entry for entry in (*CORE, *extras)}
    topics = (*known, "help", *_bench_topics())
    topic = Option("topic", "NAME", "a subcommand, or tune", nargs="?", choices=topics)
    return known | {"help": options.command("this page", topic)(help)}


def cells() -> dict[str, Callable[..., None]]:
    """Return the functions that run `%%speedkit` cells, by the name of the subcommand."""
    return {name: run for plugin in plugins.plugins() for name, run in plugin.cells.items()}


def selected(line: str, default: str = "status") -> tuple[Command, str]:
    """Return the command of a line, or `default`, and the rest. A final `-h` means `help`."""
    line = options.without_comment(line).strip()
    typed = options.split(line)
    if typed and typed[-1] in HELP:
        return commands()["help"], " ".join(typed[:-1])
    name = typed[0] if typed and not typed[0].startswith("-") else default
    if name not in commands():
        hint = did_you_mean(name, commands())
        raise UsageError(f"unknown subcommand {name!r}.{hint} See %speedkit help")
    return commands()[name], line.removeprefix(name)


def cell_command(name: str) -> Callable[..., None]:
    """Return the function that runs a subcommand's `%%speedkit` cell; raises UsageError."""
    if (run := cells().get(name)) is None:
        raise UsageError(f"{name} takes no cell: use %speedkit {name}")
    return hide_internal_frames(run)


# --- help ---

HELP = ("?", "-h", "--help")
TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPEEDBENCH = "speedbench"
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}
# Subcommands with a line on the first page of help; other subcommands are only named.
FIRST = ("auto", "status", "apply", "restore", "explain", "code", "panel", "verify", "advise")


def _benches() -> dict[str, str]:
    """Return the purpose of each use of `%%speedbench`, including uses that extras add."""
    return BENCHES | {line: told for mode in plugins.modes() for line, told in mode.about.items()}


def _bench_topics() -> dict[str, str]:
    """Return the uses of `%%speedbench` by topic: `tune` for `%%speedbench --tune`."""
    return {line.partition("--")[2].split(" ")[0] or SPEEDBENCH: line for line in _benches()}


def help_page(topic: str | None = None) -> Document:
    """Return the first page of help, or the options of a subcommand or of `%%speedbench`."""
    known = commands()
    only_cells = cells().keys() - {*FIRST}  # `auto`, on the first page, is also a line magic
    written = {name: f"{'%' * (1 + (name in only_cells))}speedkit {name}" for name in known}
    if topic is None:
        first = {written[name]: known[name].summary for name in FIRST if name in known}
        table = Table(("magic", "what it does"), [*(first | _benches()).items()])
        others = ", ".join(name for name in known if name not in FIRST)
        more = f"More subcommands: {others}. `%speedkit help apply` has its options."
        return Document(TITLE, [table, more])
    if topic in known:
        rows, title = known[topic].described(), f"{written[topic]}: {known[topic].summary}"
    else:
        line = _bench_topics()[topic]
        rows, title = speedbench.parser().described(), f"{line}: {_benches()[line]}"
    table = Table(("option", "what it does"), rows, wraps=("option",))
    return Document(title, [table or "It has no options."])


def help(names: Names, session: Session, arguments: Namespace) -> None:
    display(help_page(arguments.topic))
