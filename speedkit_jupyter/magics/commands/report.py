"""%speedkit report: each decision with its reason, and the flags before and after."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import MODEL, add_model
from speedkit_jupyter.magics.planned import named, planned
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.plan_report import context_report, plan_report
from speedkit_jupyter.session import Session


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Of one model, or of all that have a plan."""
    applied = dict(session.applied(names))
    if arguments.model is None and len(applied) > 1:
        chosen = list(applied)
    else:
        chosen = [named(names, applied, arguments.model)]
    documents = {
        name: _of_context(session, applied[name], name)
        if name in applied
        else plan_report(planned(names, session.config, name), f"`{name}` (not applied)")
        for name in chosen
    }
    if arguments.json:
        first = next(iter(documents.values()))
        every = {"models": {name: document.to_dict() for name, document in documents.items()}}
        print(first.to_json() if len(documents) == 1 else Document("", (), every).to_json())
        return
    for document in documents.values():
        display(document)


def _of_context(session: Session, context: SpeedContext, name: str) -> Document:
    found = session.found_for(context.model)
    return context_report(context, f"`{name}`", session.variable_of(context), found)


def _arguments(parser: Parser) -> None:
    add_model(parser, f"{MODEL}, or all that have a plan")
    parser.add_argument("--json", action="store_true", help="one JSON document in place of tables")


COMMAND = Command(
    "report", "each decision with its reason, and the flags before and after", run, _arguments
)
