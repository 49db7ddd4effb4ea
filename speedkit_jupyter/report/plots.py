"""Plots with matplotlib, on figures of their own: the user's pyplot state is not touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.batch_sizes import BatchSizes, Size
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import Ratio
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.split import PARTS
from speedkit_jupyter.report.colours import BAD, GOOD, LEVEL_COLOURS, NEUTRAL, PART_COLOURS, PLANNED
from speedkit_jupyter.report.units import ratio, seconds, size
from speedkit_jupyter.support.words import share
from speedkit_jupyter.tuning.curves import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A part of the step is named in its bar where it has at least this share.
LEAST_NAMED = 0.09
# In the tree of modules: levels, the narrowest box, letters in the whole width.
MOST_LEVELS, LEAST_DRAWN, LETTERS = 6, 0.002, 110
COLOURS = {"faster": GOOD, "accepted": GOOD, "slower": BAD}


def as_png(figure: Figure) -> bytes:
    """The figure as PNG bytes, at twice the screen's usual resolution."""
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


@cache
def ready() -> None:
    """Draws once: the first picture of a process takes a second, which is better spent before a
    measurement than after it.
    """
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_title("1.0×")
    as_png(figure)


def speedups(comparison: Comparison) -> Figure:
    """A dot with its interval for each variant, around 1.

    Variants without a ratio (failed, or not reached) are named and left empty.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    records = [record for record in comparison.records if record is not comparison.baseline]
    figure = Figure(figsize=(7, 0.9 + 0.45 * len(records)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
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
        label = f"{ratio(gain.median)} {verdict}"
        axes.annotate(label, (gain.median, row), (0, 8), textcoords="offset points",
                      ha="center", color=colour, fontsize=10)  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ratio(value)))
    axes.set_yticks(range(len(records)), [record.name for record in records])
    axes.set_ylim(len(records) - 0.4, -0.7)
    axes.set_xlabel(f"speed-up over {comparison.baseline.name}", color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def parts(ratios: Sequence[tuple[str, Ratio]], whole: Ratio, baseline_s: float) -> Figure:
    """The time of a step: baseline, the plan without each of its parts, and the whole plan.

    `found` are the speed-ups of the plan with a part over the plan without it; `whole` is the
    plan's over baseline.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 1.2 + 0.4 * (len(ratios) + 1)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    plan_s, last = baseline_s / whole.median, len(ratios) + 1
    axes.barh(0, baseline_s, height=0.6, color=NEUTRAL, alpha=0.5)
    for row, (_, part) in enumerate(ratios, start=1):
        without_s = plan_s * part.median
        colour = GOOD if without_s > plan_s else BAD
        axes.barh(row, plan_s, height=0.6, color=NEUTRAL, alpha=0.3)
        axes.barh(row, without_s - plan_s, left=plan_s, height=0.6, color=colour)
        more = f"{seconds(abs(without_s - plan_s))} {'more' if without_s > plan_s else 'less'}"
        axes.annotate(more, (max(without_s, plan_s), row), (6, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=10)  # fmt: skip
    axes.barh(last, plan_s, height=0.6, color=GOOD, alpha=0.5)
    axes.annotate(ratio(whole.median), (plan_s, last), (6, 0), textcoords="offset points",
                  va="center", color=GOOD, fontsize=10)  # fmt: skip
    names = ["baseline", *(f"without {name}" for name, _ in ratios), "with the plan"]
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, max(baseline_s, *(plan_s * part.median for _, part in ratios)) * 1.35)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.set_xlabel("time of one step", color=NEUTRAL)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def split(profile: Profile) -> Figure:
    """The time of one step as one bar, part after part; each is named where there is room."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 1.5), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    left_s = 0.0
    for part in PARTS:
        part_s = profile.seconds(part)
        axes.barh(0, part_s, left=left_s, height=0.7, color=PART_COLOURS[part])
        if profile.share(part) >= LEAST_NAMED:
            axes.annotate(f"{part}\n{share(profile.share(part))}", (left_s + part_s / 2, 0),
                          ha="center", va="center", color="white", fontsize=10)  # fmt: skip
        left_s += part_s
    axes.set_yticks([])
    axes.set_xlim(0, left_s or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def tree(shares: Mapping[str, float]) -> Figure:
    """Modules by their shares of a step, 0 to 1: below each one those inside of it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    levels = min(max(name.count(".") for name in shares) + 1, MOST_LEVELS)
    figure = Figure(figsize=(7, 0.5 + 0.36 * levels), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    ends: dict[str, float] = {"": 0.0}
    for name, part in shares.items():
        around, _, last = name.rpartition(".")
        level, left = name.count("."), ends.get(around, 0.0)
        ends[around], ends[name] = left + part, left
        if level >= levels or part < LEAST_DRAWN:
            continue
        axes.barh(level, part, left=left, height=1, align="edge",
                  color=LEVEL_COLOURS[level % 2], edgecolor="white", linewidth=0.6)  # fmt: skip
        room = int(part * LETTERS)
        if len(last) <= room:
            text = f"{last} {share(part)}" if len(last) + 5 <= room else last
            axes.annotate(text, (left + part / 2, level + 0.5), ha="center", va="center",
                          color="white", fontsize=9)  # fmt: skip
    axes.set_yticks([])
    axes.set_xlim(0, max(ends[""], LEAST_DRAWN))
    axes.set_ylim(levels, 0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("of a step, with all inside of it", color=NEUTRAL, fontsize=10)
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def loss_curves(curve: Curve, name: str, other: str) -> Figure:
    """Baseline, plan (its `name`) and the `other` baseline over the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    curves: tuple[tuple[list[float], str, Any], ...] = (
        (curve.other, other, {"color": NEUTRAL, "linestyle": ":", "linewidth": 1.5}),
        (curve.baseline, "baseline", {"color": NEUTRAL, "linewidth": 2.5}),
        (curve.planned, name, {"color": PLANNED, "linestyle": "--", "linewidth": 1.5}),
    )
    for losses, label, style in curves:
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set_xlabel("call of the step", color=NEUTRAL)
    axes.set_ylabel("loss", color=NEUTRAL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=NEUTRAL)
    axes.legend(frameon=False, labelcolor=NEUTRAL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(NEUTRAL)
    return figure


def batch_sizes(found: BatchSizes) -> Figure:
    """Samples a second with their intervals, and peak memory, against the size of a batch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sizes = found.measured
    numbers, rates = [one.number for one in sizes], [one.rate for one in sizes]
    ends = [one.interval or (one.rate, one.rate) for one in sizes]
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    errors = [
        [max(rate - low, 0) for rate, (low, _) in zip(rates, ends, strict=True)],
        [max(high - rate, 0) for rate, (_, high) in zip(rates, ends, strict=True)],
    ]
    axes.errorbar(numbers, rates, yerr=errors, fmt="o-", color=PLANNED, capsize=2, markersize=4)
    if found.is_proven:
        axes.axvline(found.knee.number, color=GOOD, linestyle=":")
        axes.annotate("knee", (found.knee.number, 0), xytext=(4, 4), textcoords="offset points",
                      color=GOOD, fontsize=9)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch", color=NEUTRAL)
    axes.set_ylabel("samples a second", color=PLANNED)
    _draw_memory(axes, [one for one in sizes if one.peak_bytes is not None])
    axes.tick_params(colors=NEUTRAL)
    for side in axes.spines.values():
        side.set_color(NEUTRAL)
    return figure


def _draw_memory(axes: Any, sizes: Sequence[Size]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    if not sizes:
        return
    beside = axes.twinx()
    peaks = [one.peak_bytes for one in sizes]
    beside.plot([one.number for one in sizes], peaks, "s--", color=BAD, markersize=3, linewidth=1)
    beside.set_ylim(bottom=0)
    beside.yaxis.set_major_locator(FixedLocator(round_sizes(max(filter(None, peaks)))))
    beside.set_ylabel("peak memory", color=BAD)
    beside.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value) if value else "0"))
    beside.tick_params(colors=NEUTRAL)
    for side in beside.spines.values():
        side.set_visible(False)


def round_sizes(largest: float) -> list[float]:
    """Return from 0 on the round numbers of bytes that are the ticks of an axis: 0, 20, 40 MiB."""
    unit = 1024.0 ** max(int(math.log(max(largest, 1), 1024)), 0)
    rough = largest / unit / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(factor for factor in (1, 2, 5) if factor * power <= rough) * power * unit
    return [number * step for number in range(int(largest / step) + 1)]
