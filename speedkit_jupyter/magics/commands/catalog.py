"""%speedkit catalog: every optimization there is, and what would be on, as is or declined here."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import MODEL, add_model
from speedkit_jupyter.magics.planned import planned_or_plain
from speedkit_jupyter.report.catalog_report import catalog_report
from speedkit_jupyter.session import Session


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """For one model, or for any on this machine where there is none yet."""
    plan, name = planned_or_plain(names, session, arguments.model)
    display(catalog_report(plan, name))


def _arguments(parser: Parser) -> None:
    add_model(parser, MODEL)


COMMAND = Command("catalog", "all there is: what would be on, as is or declined", run, _arguments)
