"""%speedkit panel: controls and buttons for a model's plan."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import find_function, find_model, find_optimizers
from speedkit_jupyter.magics.options import add_model, add_optimizer
from speedkit_jupyter.session import Session


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Show it."""
    _, model = find_model(names, arguments.model)
    optimizers = find_optimizers(names, arguments.optimizer, model)
    step = arguments.step
    found_step = step and find_function(names, step, "%speedkit panel")
    # A plain name stays one: it means the function that has it when Measure is pressed.
    given_step = step if step in names else found_step
    assert session.open_panel is not None
    # Without names the panel looks for them itself: an optimizer may be made after it is shown.
    given = list(optimizers.values()) if arguments.optimizer else None
    display(session.open_panel(model, optimizer=given, step=given_step))


def _arguments(parser: Parser) -> None:
    add_model(parser)
    add_optimizer(parser)
    step = "the function to measure; without it the last %%speedbench cell"
    parser.add_argument("--step", metavar="NAME", help=step)


COMMAND = Command("panel", "see, toggle and measure a model's plan with buttons", run, _arguments)
