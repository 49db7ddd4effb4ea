"""A plot of the drift of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from speedkit_jupyter.extras.rollouts.drift import Drift
from speedkit_jupyter.report.elements import BAD, NEUTRAL
from speedkit_jupyter.report.plots import axes_of
from speedkit_jupyter.support.units import share

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drift_curves(drifts: Mapping[str, Drift], tolerance: float) -> Figure:
    """Draw each way's relative error over the steps, and what is allowed."""
    axes = axes_of(3.2, "steps")
    for name, drift in drifts.items():
        # A logarithm of 0 can't be drawn.
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
