"""%speedkit autotune, and its report."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.extras.autotune import tuner
from speedkit_jupyter.extras.autotune.tuner import Counted, Model, Tuner
from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.options import Names, Option
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Table
from speedkit_jupyter.support.units import seconds, share

COLUMNS = ("model", "of", "searches", "confident up to")


@options.command(
    "max-autotune's searches for kernels of matrix products: recorded, replayed, predicted",
    options.action("status", "record", "predictions", "off"),
    Option(
        "--confidence",
        "SHARE",
        "least for a prediction (0.95)",
        type=options.number(float, "must be between 0 and 1", 0.0, 1.0),
        default=0.95,
    ),
)
def autotune(names: Names, session: Session, arguments: Namespace) -> None:
    """Carry out the action, and show the state of autotune."""
    if arguments.action == "record":
        tuner.record()
    elif arguments.action == "predictions":
        tuner.start(Tuner(arguments.confidence))
    elif arguments.action == "off":
        tuner.off()
    display(autotune_report())


def autotune_report() -> Document:
    """Return the tuner in force, its counts, and the recorded models."""
    current, own = tuner.current(), tuner.detected()
    lines = [counted_line(current.counted)] if current and current.counted != Counted() else []
    rows = [_row(model, own) for model in tuner.models()]
    if rows:
        return Document(_headline(current), [*lines, Table(COLUMNS, rows, COLUMNS[2:])])
    advice = "" if current else "`%speedkit autotune record`, then "
    nothing = f"Nothing is recorded yet: {advice}compile with mode='max-autotune'"
    return Document(_headline(current), [*lines, nothing])


def counted_line(counted: Counted) -> str:
    words = {
        "recorded": counted.searched,
        "replayed": counted.replayed,
        "predicted": counted.predictions,
        "not predicted": counted.fallbacks,
        "out of date": counted.stale,
    }
    said = ", ".join(f"{number} {word}" for word, number in words.items() if number)
    return f"{said}; {seconds(counted.seconds_saved)} saved."


def _headline(current: Tuner | None) -> str:
    if current is None:
        return "Searches of max-autotune are neither recorded nor replayed"
    if current.problem:
        return f"autotune is {current.problem}"
    if current.confidence is None:
        return "Searches of max-autotune are recorded; recorded products are replayed"
    return f"Kernels are predicted from a confidence of {share(current.confidence)} on"


def _row(model: Model, own: str) -> tuple[str, ...]:
    return (
        f"{model.name} (this device)" if model.name == own else model.name,
        model.versions,
        str(len(model.searches)),
        share(model.calibration.right[-1]) if model.calibration else BLANK,
    )


PLUGIN = Plugin([autotune])
