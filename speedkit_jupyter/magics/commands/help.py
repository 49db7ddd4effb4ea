"""%speedkit help: subcommands and every option, or those of one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.help_page import help_page
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import offer_words
from speedkit_jupyter.session import Session

SPEEDBENCH = "speedbench"


def of(commands: Mapping[str, Command]) -> Command:
    """The command that tells about these, itself included."""

    def run(names: Names, session: Session, arguments: Namespace) -> None:
        display(help_page(commands, arguments.topic))

    def arguments(parser: Parser) -> None:
        topics = (*commands, SPEEDBENCH)
        action = parser.add_argument(
            "topic", nargs="?", choices=topics, metavar="TOPIC", help="one of them; without it all"
        )
        offer_words(action, topics)

    return Command("help", "this page", run, arguments)
