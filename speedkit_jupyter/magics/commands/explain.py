"""%speedkit explain: what one optimization does, where it helps, its risk, how it is undone."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import MODEL, add_model, offer
from speedkit_jupyter.magics.planned import planned_or_plain
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.exceptions import did_you_mean


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """In general, and for one model."""
    from speedkit_jupyter.optimizations import find
    from speedkit_jupyter.report.catalog_report import explain_report

    optimization = find(arguments.optimization)
    if optimization is None:
        hint = did_you_mean(arguments.optimization, suggestions.optimizations(names))
        raise UsageError(f"%speedkit explain: no {arguments.optimization!r} in the catalog.{hint}")
    plan, name = planned_or_plain(names, session, arguments.model)
    display(explain_report(optimization, plan[optimization.name], name))


def _arguments(parser: Parser) -> None:
    which = "a name of the catalog, as gemm"
    offer(
        parser.add_argument("optimization", metavar="NAME", help=which), suggestions.optimizations
    )
    add_model(parser, MODEL)


COMMAND = Command(
    "explain", "what one optimization does, where it helps, its risk", run, _arguments
)
