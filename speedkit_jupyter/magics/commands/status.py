"""%speedkit: hardware, what is on, what is left on the table."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.namespace import models
from speedkit_jupyter.magics.planned import planned
from speedkit_jupyter.report.plan_report import status_report
from speedkit_jupyter.session import Session

# Of models without a plan, so many for a first look.
MOST_MODELS = 3


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Plans that are applied, or else what applying would do."""
    applied = session.applied(names)
    first = [] if applied else _first_models(names)
    plans = [(name, planned(names, session.config, name)) for name in first]
    display(status_report(Hardware.current(), applied, plans, session.variable_of))


def _first_models(names: Names) -> list[str]:
    """Some models with parameters."""
    candidates = [n for n, m in models(names).items() if next(m.parameters(), None) is not None]
    return candidates[:MOST_MODELS]


COMMAND = Command("status", "hardware, what is on, what is left on the table", run)
