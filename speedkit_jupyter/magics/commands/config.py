"""%speedkit config: what apply starts from."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import offer
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Section
from speedkit_jupyter.session import Session

ACTIONS = ("show", "load", "save", "reset")


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Show, load, save or reset it."""
    if arguments.action in ("load", "save") and not arguments.file:
        raise UsageError(f"%speedkit config {arguments.action}: which FILE?")
    if arguments.action == "load":
        session.config = SpeedConfig.from_yaml(arguments.file)
    if arguments.action == "reset":
        session.config = SpeedConfig()
    if arguments.action == "save":
        try:
            session.config.to_yaml(arguments.file)
        except OSError as error:
            raise UsageError(f"{arguments.file}: {error.strerror}") from None
    headline = {
        "show": "This session's config; `%speedkit apply` starts from it",
        "load": f"Loaded {arguments.file}; `%speedkit apply` starts from it",
        "reset": "Everything is auto again",
        "save": f"Saved to {arguments.file}",
    }[arguments.action]
    body = Code(session.config.to_yaml().rstrip())
    display(Document(headline, (Section(body),), session.config.to_dict()))


def _arguments(parser: Parser) -> None:
    verb = "what to do with what apply starts from (show)"
    parser.add_argument(
        "action", nargs="?", choices=ACTIONS, default="show", metavar="ACTION", help=verb
    )
    file = "a YAML file, for load and save"
    offer(parser.add_argument("file", nargs="?", metavar="FILE", help=file), suggestions.configs)


COMMAND = Command("config", "show, load or save the session's config", run, _arguments)
