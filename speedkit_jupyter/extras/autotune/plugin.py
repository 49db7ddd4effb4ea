"""The magic `%speedkit autotune`, and its report."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.extras.autotune import tuner
from speedkit_jupyter.extras.autotune.tuner import Counted, Tuner
from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.options import Names, Option
from speedkit_jupyter.notebook.plugins import Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.support.units import count, seconds, share

CONFIDENCE = options.number(float, "must be between 0 and 1", 0.0, 1.0)


@options.command(
    "max-autotune's searches for kernels of matrix products: recorded, replayed, predicted",
    options.action("status", "record", "predictions", "off"),
    Option("--confidence", "SHARE", "least for a prediction (0.95)", type=CONFIDENCE, default=0.95),
)
def autotune(names: Names, session: Session, arguments: Namespace) -> None:
    if arguments.action == "record":
        tuner.record()
    elif arguments.action == "predictions":
        tuner.start(Tuner(arguments.confidence))
    elif arguments.action == "off":
        tuner.off()
    current, own = tuner.current(), tuner.detected()
    lines = [counted_line(current.counted)] if current and current.counted != Counted() else []
    for model in tuner.models():
        line = f"{model.name}: {count(len(model.searches), 'product')}, {model.versions}"
        if model.calibration:
            line += f", confident up to {share(model.calibration.right[-1])}"
        lines.append(line + " (this device)" * (model.name == own))
    if not tuner.models():
        advice = "" if current else "`%speedkit autotune record`, then "
        lines.append(f"Nothing is recorded yet: {advice}compile with mode='max-autotune'")
    display(Document(_headline(current), ["\n".join(lines)]))


def counted_line(counted: Counted) -> str:
    words = {
        "recorded": counted.searched, "replayed": counted.replayed,
        "predicted": counted.predictions, "not predicted": counted.fallbacks,
        "out of date": counted.stale,
    }  # fmt: skip
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


PLUGIN = Plugin([autotune])
