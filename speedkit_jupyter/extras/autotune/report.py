"""The report of max-autotune's searches for kernels."""

from __future__ import annotations

from collections.abc import Sequence

from speedkit_jupyter.extras.autotune.tuner import Counted, Model, Tuner
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Table
from speedkit_jupyter.support.units import seconds, share

SEARCHES = ("model", "of", "searches", "a search", "fastest first", "in first 3", "confident up to")
RECORD = "`%speedkit autotune record`, then "
NONE = "Nothing is recorded yet: {}compile with mode='max-autotune'"
MEANING = (
    "“Fastest first” and “in first 3”: the share of shapes, held back from training, for which the "
    "first kernels of the ranking hold one within 2 % of the fastest."
)


def autotune_report(
    tuner: Tuner | None, models: Sequence[Model], detected: str, chosen: str | None = None
) -> Document:
    """Return what is in force of autotune, what it did, and what is recorded."""
    lines = [counted_line(tuner.counted)] if tuner and tuner.counted != Counted() else []
    if chosen:
        lines.append(f"Predictions are by {chosen} in the place of {detected}.")
    rows = [_row(model, detected) for model in models]
    table = Table(SEARCHES, rows, SEARCHES[2:], wraps=SEARCHES[:2])
    body = [table, MEANING] if rows else [NONE.format("" if tuner else RECORD)]
    return Document(_headline(tuner), [*lines, *body])


def counted_line(counted: Counted) -> str:
    """Return what happened to searches so far, in one line."""
    words = [
        f"{counted.searched} recorded ({seconds(counted.searched_s)})",
        f"{counted.replayed} replayed",
        f"{counted.predictions} predicted",
    ]
    if counted.mean_confidence is not None:
        words[-1] += f" with a mean confidence of {share(counted.mean_confidence)}"
    words += [f"{counted.fallbacks} not predicted"] if counted.fallbacks else []
    words += [f"{counted.stale} out of date"] if counted.stale else []
    return f"{', '.join(words)}; about {seconds(counted.seconds_saved)} saved."


def _headline(tuner: Tuner | None) -> str:
    if tuner is None:
        return "Searches of max-autotune are neither recorded nor replayed"
    if tuner.problem:
        return f"autotune is {tuner.problem}"
    if not tuner.options.predicts:
        return "Searches of max-autotune are recorded, and replayed where they were before"
    return f"Kernels are predicted from a confidence of {share(tuner.options.confidence)} on"


def _row(model: Model, detected: str) -> tuple[str, ...]:
    found = model.calibration
    known = [share(one) for one in (found.top[0], found.top[-1], found.right[-1])] if found else []
    return (
        f"{model.name} (this device)" if model.name == detected else model.name,
        model.versions,
        str(len(model.searches)),
        seconds(model.median_s),
        *(known or [BLANK] * 3),
    )
