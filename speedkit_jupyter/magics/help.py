"""Help, made of the parsers themselves, so that it lists every option there is."""

from __future__ import annotations

from dataclasses import replace

from speedkit_jupyter.magics import parsing
from speedkit_jupyter.magics.line import described
from speedkit_jupyter.report.document import Document, Row, Section, Table

TITLE = "SpeedKit: faster PyTorch, measured, explained and undone exactly"
SPELLING = "An option with _ may have - there: --channels_last is --channels-last."
BENCHES = {
    "%%speedbench": "time a cell, with the options of %%timeit",
    "%%speedbench --compare baseline,auto": "compare plans for a cell",
    "%%speedbench --tune": "search the fastest safe plan for a cell",
}


def help_page(topic: str | None = None) -> Document:
    """All subcommands and options, or those of one."""
    if topic is not None:
        what = parsing.SUBCOMMANDS.get(topic, BENCHES["%%speedbench"])
        return Document(f"{_command(topic)}: {what}", (replace(_options(topic), title=""),))
    commands = {f"%speedkit {name}": what for name, what in parsing.SUBCOMMANDS.items()} | BENCHES
    table = Table(("magic", "what it does"), tuple(map(Row, commands.items())))
    return Document(TITLE, (Section(table), Section(SPELLING), *map(_options, parsing.PARSERS)))


def _options(topic: str) -> Section:
    make = parsing.PARSERS.get(topic)
    if make is None:
        return Section("It has no options.")
    rows = tuple(map(Row, described(make())))
    return Section(Table(("option", "what it does"), rows, wraps=("option",)), _command(topic))


def _command(topic: str) -> str:
    return "%%speedbench" if topic == "speedbench" else f"%speedkit {topic}"
