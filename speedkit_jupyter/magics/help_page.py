"""Help, made of the parsers themselves, so that it lists every option there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from speedkit_jupyter.magics import speedbench_options
from speedkit_jupyter.magics.command import Command
from speedkit_jupyter.magics.line import Parser, described
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table

TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPELLING = "An option with _ may have - there: --channels_last is --channels-last."
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --profile": "where the time of a cell goes",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}


def help_page(commands: Mapping[str, Command], topic: str | None = None) -> Document:
    """All subcommands and options, or those of one."""
    parsers = _parsers(commands)
    if topic is not None:
        summary = commands[topic].summary if topic in commands else BENCHES["%%speedbench"]
        section = _options(topic, parsers.get(topic))
        return Document(f"{_command(topic)}: {summary}", (replace(section, title=""),))
    magics = {f"%speedkit {entry.name}": entry.summary for entry in commands.values()} | BENCHES
    table = Table(("magic", "what it does"), tuple(map(Row, magics.items())))
    sections = (_options(name, parser) for name, parser in parsers.items())
    return Document(TITLE, (Section(table), Section(SPELLING), *sections))


def _parsers(commands: Mapping[str, Command]) -> dict[str, Parser]:
    """Of all that take anything."""
    taking = {name: entry.parser for name, entry in commands.items() if entry.takes_arguments}
    return {speedbench_options.NAME: speedbench_options.parser(), **taking}


def _options(topic: str, parser: Parser | None) -> Section:
    if parser is None:
        return Section("It has no options.")
    rows = tuple(map(Row, described(parser)))
    return Section(Table(("option", "what it does"), rows, wraps=("option",)), _command(topic))


def _command(topic: str) -> str:
    return "%%speedbench" if topic == speedbench_options.NAME else f"%speedkit {topic}"
