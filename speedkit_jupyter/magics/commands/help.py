"""%speedkit help, verbosity, repair. Help is made of the parsers, so that it lists every option."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from IPython.display import display

from speedkit_jupyter.machines import flags
from speedkit_jupyter.magics.line import Command, Names, Parser, described
from speedkit_jupyter.magics.options import speedbench_parser
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
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


def help_command(commands: Mapping[str, Command]) -> Command:
    """Return the command that tells about these, itself included."""

    def run(names: Names, session: Session, arguments: Namespace) -> None:
        display(help_page(commands, arguments.topic))

    def options(parser: Parser) -> None:
        topics = (*commands, SPEEDBENCH)
        about = "one of them; without it all"
        parser.option("topic", "TOPIC", about, words=topics, nargs="?", choices=topics)

    return Command("help", "this page", run, options)


def help_page(commands: Mapping[str, Command], topic: str | None = None) -> Document:
    """Return all subcommands and options, or those of one."""
    if topic is not None:
        summary = commands[topic].summary if topic in commands else BENCHES["%%speedbench"]
        return Document(f"{_magic(topic)}: {summary}", (_options(commands, topic, ""),))
    magics = {f"%speedkit {entry.name}": entry.summary for entry in commands.values()} | BENCHES
    table = Table(("magic", "what it does"), tuple(map(Row, magics.items())))
    taking = [SPEEDBENCH, *(name for name, entry in commands.items() if entry.takes_arguments)]
    sections = (_options(commands, name, _magic(name)) for name in taking)
    return Document(TITLE, (Section(table), Section(SPELLING), *sections))


def _options(commands: Mapping[str, Command], topic: str, title: str) -> Section:
    parser = speedbench_parser() if topic == SPEEDBENCH else commands[topic].parser
    rows = tuple(map(Row, described(parser)))
    if not rows:
        return Section("It has no options.")
    return Section(Table(("option", "what it does"), rows, wraps=("option",)), title)


def _magic(topic: str) -> str:
    return "%%speedbench" if topic == SPEEDBENCH else f"%speedkit {topic}"


def verbosity(names: Names, session: Session, arguments: Namespace) -> None:
    """Choose how much is said beside results, or say how much it is."""
    if arguments.level is not None:
        messages.choose(arguments.level)
    about = {
        "quiet": "warnings alone, and no progress",
        "normal": "notes, warnings and progress",
        "debug": "everything",
    }[messages.verbosity()]
    display(Document(f"Verbosity {messages.verbosity()}: {about}"))


def _verbosity_options(parser: Parser) -> None:
    about = "quiet, normal or debug; without it the present one is shown"
    parser.option("level", "LEVEL", about, nargs="?", choices=tuple(messages.LEVELS))


def repair(names: Names, session: Session, arguments: Namespace) -> None:
    """Make the TF32 settings in force agree."""
    mixed = flags.repair()
    text = "The two agree again; TF32 stays on where it was on" if mixed else "Nothing to repair"
    display(Document(f"torch's TF32 settings: {text}", (), {"repaired": mixed}))


VERBOSITY = Command("verbosity", "how much is said beside results", verbosity, _verbosity_options)
REPAIR = Command("repair", "make torch's two TF32 APIs agree again after they were mixed", repair)
