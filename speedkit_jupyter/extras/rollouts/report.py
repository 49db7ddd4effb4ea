"""The report of a rollout: the way that was taken, its reasons, and the drift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from speedkit_jupyter.extras.rollouts.api import Rollout
from speedkit_jupyter.extras.rollouts.drift import Drift
from speedkit_jupyter.extras.rollouts.way_choice import WayTrial
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BAD, BLANK, NEUTRAL, Picture, Row, Table
from speedkit_jupyter.report.plots import as_png, axes_of
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support.units import between, count, ratio, seconds, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("", "way", "a step", "over the best before", INTERVAL, "drift", "")


@report_of.register
def rollout_report(result: Rollout) -> Document:
    """Return the steps first, then each way that was measured."""
    done = count(result.steps, "step")
    if not result.is_complete:
        done = f"stopped after {result.steps:,} of {count(result.asked, 'step')}"
    headline = f"{done} in {seconds(result.seconds)}: {result.way.name}"
    taken = result.taken
    if taken is not None and taken.over_best is not None:
        headline += f", about {ratio(taken.over_plain)} as fast as the plain loop"
        if taken.drift is not None:
            headline += f", drift {drifted(taken.drift)}"
    table = Table(COLUMNS, [_row(result, one) for one in result.trials], COLUMNS[2:6],
                  wraps=("way",))  # fmt: skip
    drifts, picture = result.drifts(), None
    if drifts:
        png = lambda: as_png(drift_curves(drifts, result.tolerance))  # noqa: E731
        picture = Picture(png, "The drift of each way")
    return Document(headline, [table, picture, *_words(result)], result.to_dict())


def drifted(drift: Drift) -> str:
    """Return the largest drift in words, and its steps if it is extrapolated."""
    if not math.isfinite(drift.largest):
        return f"unknown beyond {count(drift.steps[-1], 'step')}" if drift.steps else BLANK
    words = f"{100 * drift.largest:.2g} %"
    return words if drift.is_whole else f"{words} (extrapolated from {drift.steps[-1]:,} steps)"


def _row(result: Rollout, one: WayTrial) -> Row:
    found, is_taken = one.over_best, one is result.taken
    cells = (
        "→" if is_taken else "",
        one.way.name,
        BLANK if one.step_s is None else seconds(one.step_s),
        ratio(found.median) if found else "",
        between(found.low, found.high) if found else "",
        drifted(one.drift) if one.drift else "",
        one.why_not or ("the loop as it is" if not found else "taken" if is_taken else "kept"),
    )
    is_bad = one.why_not.startswith(("failed", "drifts"))
    return Row(cells, "good" if is_taken and found else "bad" if is_bad else "plain")


def _words(result: Rollout) -> list[str]:
    if not result.trials:
        return ["Nothing was measured: `tune=True` looks for a faster way."]
    words = [
        "Drift is the largest distance from float32 over the steps, as a share of the state's "
        f"norm, of the first samples; {share(result.tolerance)} is allowed (tolerance=)."
    ]
    if (result.rounding or 0.0) > result.tolerance:
        words.append(
            "These states are chaotic: one rounding in float32 moves them by "
            f"{share(result.rounding or 0.0)}. Ways in float32 may drift by twice that."
        )
    return words


def drift_curves(drifts: Mapping[str, Drift], tolerance: float) -> Figure:
    """Return a figure of each way's relative error over the steps, with the tolerance."""
    axes = axes_of(3.2, "steps")
    for name, drift in drifts.items():
        # The logarithm of 0 can't be drawn.
        points = [(step, error) for step, error in zip(drift.steps, drift.errors, strict=True)
                  if error > 0]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
    axes.axhline(tolerance, color=BAD, linewidth=1, linestyle="--", label="allowed")
    axes.set_yscale("log" if tolerance > 0 else "linear")
    axes.set_ylabel("distance from float32", color=NEUTRAL)
    axes.yaxis.set_major_formatter(
        lambda value, _: share(value) if value >= 1e-4 else f"{value:.0e}"
    )
    axes.legend(frameon=False, labelcolor=NEUTRAL)
    return axes.figure  # type: ignore[no-any-return]
