"""%speedkit help, verbosity. Help is made of the parsers, so that it lists every option."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from IPython.display import display

from speedkit_jupyter.magics.line import Command, Names, Option, command
from speedkit_jupyter.magics.options import speedbench_parser
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table
from speedkit_jupyter.session import Session
from speedkit_jupyter.support import messages

TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPELLING = "An option with _ may have - there: --channels_last is --channels-last."
SPEEDBENCH = "speedbench"
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --profile": "where the time of a cell goes",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}
LEVELS = {
    "quiet": "warnings alone, and no progress",
    "normal": "notes, warnings and progress",
    "debug": "everything",
}


def help_command(commands: Mapping[str, Command]) -> Command:
    """Return the command that tells about these, itself included."""
    topics = (*commands, "help", SPEEDBENCH)
    about = "one of them; without it all"
    topic = Option("topic", "TOPIC", about, words=topics, nargs="?", choices=topics)

    def run(names: Names, session: Session, arguments: Namespace) -> None:
        display(help_page(commands, arguments.topic))

    return Command("help", "this page", (topic,), run)


def help_page(commands: Mapping[str, Command], topic: str | None = None) -> Document:
    """Return all subcommands and options, or those of one."""

    def options(topic: str) -> Table:
        parser = speedbench_parser() if topic == SPEEDBENCH else commands[topic].parser
        return Table(("option", "what it does"), parser.described(), wraps=("option",))

    if topic is not None:
        summary = commands[topic].summary if topic in commands else BENCHES["%%speedbench"]
        return Document(f"{_magic(topic)}: {summary}", [options(topic) or "It has no options."])
    magics = {_magic(name): entry.summary for name, entry in commands.items()} | BENCHES
    table = Table(("magic", "what it does"), list(magics.items()))
    every = [Section(options(name), _magic(name)) for name in (SPEEDBENCH, *commands)]
    return Document(TITLE, [table, SPELLING, *every])


def _magic(topic: str) -> str:
    return "%%speedbench" if topic == SPEEDBENCH else f"%speedkit {topic}"


@command(
    "how much is said beside results",
    Option("level", "LEVEL", "without it: as it is", nargs="?", choices=tuple(messages.LEVELS)),
)
def verbosity(names: Names, session: Session, arguments: Namespace) -> None:
    """Choose how much is said beside results, or say how much it is."""
    if arguments.level is not None:
        messages.choose(arguments.level)
    level = messages.verbosity()
    display(Document(f"Verbosity {level}: {LEVELS[level]}"))
