"""%speedkit: hardware, what is on, what is left on the table."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from typing import Any

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
    first = {} if applied else _first_models(names)
    plans = [
        (name, planned(names, session.config, name), session.found_for(model))
        for name, model in first.items()
    ]
    hardware = Hardware.current()
    display(status_report(hardware, applied, plans, session.variable_of, session.found_for))


def _first_models(names: Names) -> dict[str, Any]:
    """Some models with parameters."""
    trainable = (
        (name, model)
        for name, model in models(names).items()
        if next(model.parameters(), None) is not None
    )
    return dict(islice(trainable, MOST_MODELS))


COMMAND = Command("status", "hardware, what is on, what is left on the table", run)
