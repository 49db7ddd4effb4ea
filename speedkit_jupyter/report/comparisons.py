"""Reports about benchmarks."""

from __future__ import annotations

import math

from speedkit_jupyter.measure.comparison import Comparison, Record
from speedkit_jupyter.measure.statistics import spread
from speedkit_jupyter.report.document import Document, Picture, Row, Section, Table, Tone
from speedkit_jupyter.report.units import count, ratio, seconds, word

TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "wrong": "bad", "failed": "bad"}


def comparison_report(comparison: Comparison) -> Document:
    """The table of a benchmark, with what it means in one line."""
    rows = tuple(_row(comparison, record) for record in comparison.records)
    columns = (
        "variant",
        "median",
        "middle half",
        "speed-up",
        "95 % interval",
        "first call",
        "accuracy",
        "verdict",
    )
    table = Table(columns, rows, numbers=columns[1:-2])
    sections = [Section(table), *_plot(comparison), Section(_applied(comparison))]
    return Document(_headline(comparison), tuple(sections), comparison.to_dict())


def _plot(comparison: Comparison) -> list[Section]:
    """A picture once there is more than one ratio to look at."""
    from speedkit_jupyter.report import plots

    if sum(comparison.ratio(one) is not None for one in comparison.records) < 2:
        return []
    png = plots.as_png(plots.speedups(comparison))
    return [Section(Picture(png, "Speed-up of each variant with its interval, as in the table"))]


def _headline(comparison: Comparison) -> str:
    environment = comparison.environment
    rounds = count(len(comparison.baseline.times_s), "round")
    where = f"{environment.get('device')}, torch {environment.get('torch')}, {rounds}"
    ahead = [r for r in comparison.records if comparison.verdict(r) == "faster"]
    if not ahead:
        return f"Nothing is proven faster than {comparison.baseline.name} ({where})"
    best = max(ahead, key=lambda record: _median(comparison, record))
    low_high = comparison.ratio(best)
    assert low_high is not None
    return (
        f"{best.name} is {ratio(low_high.median)} as fast as {comparison.baseline.name}, "
        f"95 % interval {ratio(low_high.low)} to {ratio(low_high.high)} ({where})"
    )


def _median(comparison: Comparison, record: Record) -> float:
    found = comparison.ratio(record)
    return 0.0 if found is None else found.median


def _row(comparison: Comparison, record: Record) -> Row:
    verdict = comparison.verdict(record)
    tone = TONES.get(verdict, "plain")
    seen = comparison.times_s(record)
    if record.failure or not seen:
        blank = ("–",) * 6
        return Row((record.name, *blank, f"{verdict}: {record.failure or 'not reached'}"), tone)
    times, found = spread(seen), comparison.ratio(record)
    low_high = "–" if found is None else f"{ratio(found.low)} to {ratio(found.high)}"
    return Row(
        (
            record.name,
            seconds(times.median_s),
            f"{seconds(times.low_s)} to {seconds(times.high_s)}",
            "–" if found is None else ratio(found.median),
            low_high,
            "–" if record.first_call_s is None else seconds(record.first_call_s),
            _accuracy(record),
            _with_seconds(comparison, record, verdict),
        ),
        tone,
    )


def _accuracy(record: Record) -> str:
    """In a word, with the larger relative error, of outputs and gradients, where it is rounding."""
    found = record.accuracy
    if found is None:
        return "–"
    error = found.output_error
    if found.verdict != "rounding" or error is None:
        return "as exact" if found.verdict == "exact" else found.verdict
    return f"rounding {max(error, found.gradient_error or 0):.1g}"


def _with_seconds(comparison: Comparison, record: Record, verdict: str) -> str:
    """`too noisy` with the budget that would settle it."""
    needed = comparison.seconds_needed(record)
    if verdict != "too noisy" or needed is None:
        return verdict
    return f"{verdict}: --budget {math.ceil(1.5 * needed)} may settle it"


def _applied(comparison: Comparison) -> str:
    lines = []
    for record in comparison.records:
        if record.same_as_baseline:
            lines.append(f"{record.name}: changes nothing here, so there is nothing to measure")
        what = [k if v is True else f"{k} {word(v)}" for k, v in record.applied.items()]
        if what and not record.failure:
            lines.append(f"{record.name}: {', '.join(what)}")
        if record.accuracy is not None and record.accuracy.reason:
            lines.append(f"{record.name}: {record.accuracy.verdict}: {record.accuracy.reason}")
        lines += [f"{record.name}: {name}: {note}" for name, note in record.notes.items()]
    lines.append(
        "Median time of one step, device synchronized; speed-up: median of the ratios within "
        "each round; first call and warm-up apart. Model, optimizer and random state are as before."
    )
    if comparison.too_few_rounds():
        lines.append("Too few rounds for an interval: give a larger --budget.")
    return "\n".join(lines)
