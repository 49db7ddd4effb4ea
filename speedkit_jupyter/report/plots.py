"""Plots with matplotlib, on figures of their own: the user's pyplot state is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.comparison import Comparison
from speedkit_jupyter.report.units import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Legible on white and on near-black; the same meaning stands in the label of each row.
COLOURS = {"faster": "#2ea043", "slower": "#da3633"}
NEUTRAL = "#8b949e"


def as_png(figure: Figure) -> bytes:
    """The figure as PNG bytes, at twice the screen's usual resolution."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def speedups(comparison: Comparison) -> Figure:
    """A dot with its interval for each variant, around 1.

    Variants without a ratio (failed, or not reached) are named and left empty.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    records = [one for one in comparison.records if one is not comparison.baseline]
    figure = Figure(figsize=(7, 0.9 + 0.45 * len(records)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.axvline(1, color=NEUTRAL, linewidth=1, linestyle="--")
    for row, record in enumerate(records):
        found, verdict = comparison.ratio(record), comparison.verdict(record)
        colour = COLOURS.get(verdict, NEUTRAL)
        if found is None:
            axes.annotate(verdict, (1, row), color=colour, va="center")
            continue
        if found.low > 0 and found.high < float("inf"):
            axes.plot([found.low, found.high], [row, row], color=colour, linewidth=3, alpha=0.6)
        axes.plot(found.median, row, "o", color=colour)
        label = f"{ratio(found.median)} {verdict}"
        axes.annotate(label, (found.median, row), (0, 8), textcoords="offset points",
                      ha="center", color=colour, fontsize=9)  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ratio(value)))
    axes.set_yticks(range(len(records)), [record.name for record in records])
    axes.set_ylim(len(records) - 0.4, -0.7)
    axes.set_xlabel(f"speed-up over {comparison.baseline.name}", color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def parts(found: Sequence[tuple[str, float]], whole: str, comparison: Comparison) -> Figure:
    """Bars from 1: each part alone, then the whole with its confirmed interval."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    together = comparison.ratio(comparison.records[1])
    assert together is not None
    rows = [*found, (whole, together.median)]
    figure = Figure(figsize=(7, 0.9 + 0.4 * len(rows)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.axvline(1, color=NEUTRAL, linewidth=1, linestyle="--")
    for row, (_, value) in enumerate(rows):
        colour = COLOURS["faster"] if row == len(found) else NEUTRAL
        axes.barh(row, value - 1, left=1, height=0.5, color=colour)
        axes.annotate(ratio(value), (max(value, 1), row), (6, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=9)  # fmt: skip
    axes.plot([together.low, together.high], [len(found)] * 2, color="black", linewidth=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ratio(value)))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"speed-up over {comparison.baseline.name}", color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure
