"""%speedkit autotune."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.extras.autotune import api
from speedkit_jupyter.extras.autotune.report import autotune_report
from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.options import Names, Option, switch
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session

share = options.number(float, "must be between 0 and 1", 0.0, 1.0)


@options.command(
    "max-autotune's searches for kernels of matrix products: recorded, replayed, predicted",
    options.action("status", "record", "train", "predictions", "off"),
    Option("--confidence", "SHARE", "least for a prediction (0.95)", type=share, default=0.95),
    Option("--model", "NAME", "predict, or train, by the model of another device"),
    switch("--no_fallback", "predict below the confidence too"),
    switch("--no_remember", "keep nothing of what is measured"),
)
def autotune(names: Names, session: Session, arguments: Namespace) -> None:
    """Put one of them in force, and say what was recorded and saved."""
    action, remember = arguments.action, not arguments.no_remember
    if arguments.model:
        api.use(arguments.model)
    if action == "train":
        api.train(api.chosen())
    elif action == "record":
        api.record(remember)
    elif action == "predictions":
        api.start(api.predicting(arguments.confidence, not arguments.no_fallback, remember))
    elif action == "off":
        api.off()
    display(autotune_report(api.current(), api.models(), api.detected(), api.chosen()))


PLUGIN = Plugin([autotune])
