"""Plots with matplotlib, on figures of their own: the user's pyplot state is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.report.elements import BAD, GOOD, NEUTRAL, PLANNED
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.curves import Curve
from speedkit_jupyter.support.units import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"faster": GOOD, "accepted": GOOD, "slower": BAD}


def as_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes, at twice the screen's usual resolution."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def axes_of(height: float, x_label: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label, color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return axes


def speedups(comparison: Comparison) -> Figure:
    """Draw a dot with its interval for each variant, around 1; without a ratio its verdict."""
    records = [record for record in comparison.records if record is not comparison.baseline]
    axes = axes_of(0.9 + 0.45 * len(records), f"speed-up over {comparison.baseline.name}")
    axes.xaxis.set_major_formatter(lambda value, _: ratio(value))
    axes.axvline(1, color=NEUTRAL, linewidth=1, linestyle="--")
    for row, record in enumerate(records):
        gain, verdict = comparison.ratio(record), comparison.verdict(record)
        colour = COLOURS.get(verdict, NEUTRAL)
        if gain is None:
            axes.annotate(verdict, (1, row), color=colour, va="center")
            continue
        if gain.low > 0 and gain.high < float("inf"):
            axes.plot([gain.low, gain.high], [row, row], color=colour, linewidth=3, alpha=0.6)
        axes.plot(gain.median, row, "o", color=colour)
        text, look = ratio(gain.median), {"color": colour, "fontsize": 10, "ha": "center"}
        axes.annotate(text, (gain.median, row), (0, 8), textcoords="offset points", **look)
    axes.set_yticks(range(len(records)), [record.name for record in records])
    axes.set_ylim(len(records) - 0.4, -0.7)
    return axes.figure  # type: ignore[no-any-return]


def loss_curves(curve: Curve, name: str, other: str) -> Figure:
    """Draw baseline, plan (its `name`) and the `other` baseline over the calls of the step."""
    axes = axes_of(3.2, "call of the step")
    curves: tuple[tuple[list[float], str, Any], ...] = (
        (curve.other, other, {"color": NEUTRAL, "linestyle": ":", "linewidth": 1.5}),
        (curve.baseline, "baseline", {"color": NEUTRAL, "linewidth": 2.5}),
        (curve.planned, name, {"color": PLANNED, "linestyle": "--", "linewidth": 1.5}),
    )
    for losses, label, style in curves:
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set_ylabel("loss", color=NEUTRAL)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, labelcolor=NEUTRAL)
    return axes.figure  # type: ignore[no-any-return]
