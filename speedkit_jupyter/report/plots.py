"""Plots with matplotlib, on figures of their own: the user's pyplot state is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.comparison import Comparison
from speedkit_jupyter.measure.statistics import Ratio
from speedkit_jupyter.report.units import ratio, seconds
from speedkit_jupyter.tuning.verification import Verification

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


def waterfall(found: Sequence[tuple[str, Ratio]], baseline_s: float) -> Figure:
    """From the baseline's step down to the plan's: the time that each part takes away.

    `found` are the speed-ups with each part added to those before it; the last has its interval.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 1.2 + 0.4 * (len(found) + 1)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    whole = found[-1][1]
    axes.barh(0, baseline_s, height=0.6, color=NEUTRAL, alpha=0.5)
    before_s = baseline_s
    for row, (_, part) in enumerate(found, start=1):
        after_s = baseline_s / part.median
        colour = COLOURS["faster"] if after_s < before_s else COLOURS["slower"]
        axes.barh(row, after_s - before_s, left=before_s, height=0.6, color=colour)
        saved = f"{seconds(abs(after_s - before_s))} {'less' if after_s < before_s else 'more'}"
        label = f"{saved}, now {ratio(part.median)}"
        axes.annotate(label, (max(before_s, after_s), row), (6, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=9)  # fmt: skip
        before_s = after_s
    row = len(found) + 1
    axes.barh(row, baseline_s / whole.median, height=0.6, color=COLOURS["faster"], alpha=0.5)
    if whole.low > 0 and whole.high < float("inf"):
        axes.plot([baseline_s / whole.high, baseline_s / whole.low], [row, row],
                  color=NEUTRAL, linewidth=3)  # fmt: skip
    names = ["baseline", *(f"+ {name}" for name, _ in found), "with the plan"]
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, baseline_s * 1.35)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.set_xlabel("time of one step", color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def loss_curves(found: Verification) -> Figure:
    """Baseline, plan and the other baseline over the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    other = "baseline, rounded weights" if found.by_weights else "baseline, other seed"
    curves: tuple[tuple[list[float], str, Any], ...] = (
        (found.other_seed, other, {"color": NEUTRAL, "linestyle": ":", "linewidth": 1.5}),
        (found.baseline, "baseline", {"color": NEUTRAL, "linewidth": 2.5}),
        (found.planned, found.name, {"color": "#1f6feb", "linestyle": "--", "linewidth": 1.5}),
    )
    for losses, label, style in curves:
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set_xlabel("step", color=NEUTRAL)
    axes.set_ylabel("loss", color=NEUTRAL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=NEUTRAL)
    axes.legend(frameon=False, labelcolor=NEUTRAL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(NEUTRAL)
    return figure
