"""The table of a benchmark, and its words."""

from __future__ import annotations

import math
import re

from speedkit_jupyter.measure.checks import counted_columns
from speedkit_jupyter.measure.checks.counted_columns import Quantity
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import INTERVAL, spread
from speedkit_jupyter.measure.rounds.budget import LONGER
from speedkit_jupyter.report.elements import Row, Table, Tone
from speedkit_jupyter.report.score_words import shown
from speedkit_jupyter.report.units import ratio, seconds, size, with_unit
from speedkit_jupyter.support.words import share

BLANK = "–"
TONES: dict[str, Tone] = {
    "faster": "good",
    "accepted": "good",
    "slower": "bad",
    "wrong": "bad",
    "failed": "bad",
}
# What takes up to 2 % longer is not called slower.
NO_GAIN = 0.98
CHANGES = "changes the results"
# A reason of so many characters has room in the table.
SHORT = 60
# An expression of more would take the others' place.
LONG = 20


# Columns that are no numbers, that break into lines, that stand beside a panel's controls, and that
# leave a text which is too narrow, the last one first.
WORDS = ("variant", "verdict", "accuracy")
WRAPS = (*WORDS, INTERVAL)
BRIEF = (*WORDS, "median", "speed-up", INTERVAL)
LEAVING = ("memory", "first call", "of limit")


def comparison_table(comparison: Comparison, is_brief: bool = False) -> Table:
    """Return a row for each variant; those without times share one for each reason.

    A column with nothing in it is left out.
    """
    groups = _groups(comparison)
    rows = [_cells(comparison, group) for group in groups]
    score = _score_title(comparison)
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    if is_brief:
        titles = [title for title in titles if title in (*BRIEF, score)]
    counts = [quantity.title for quantity in counted(comparison)]
    return Table(
        tuple(titles),
        tuple(
            Row(tuple(row[title] or BLANK for title in titles), _tone(comparison, group[0]))
            for row, group in zip(rows, groups, strict=True)
        ),
        numbers=tuple(title for title in titles if title not in WORDS),
        wraps=tuple(title for title in titles if title in WRAPS),
        optional=tuple(title for title in (*counts, *LEAVING) if title in titles),
    )


def counted(comparison: Comparison) -> list[Quantity]:
    """Return what this machine counts beside the times."""
    names = {name for record in comparison.records for name in record.quantities}
    every = (each for one in counted_columns.QUANTITIES for each in (one, one.of_a_sample))
    return [quantity for quantity in every if quantity.name in names]


def _groups(comparison: Comparison) -> list[list[Record]]:
    """Each record that has times alone; the others together with those of the same reason."""
    groups: dict[str, list[Record]] = {}
    for record in comparison.records:
        key = str(id(record)) if _is_timed(comparison, record) else _verdict(comparison, record)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _is_timed(comparison: Comparison, record: Record) -> bool:
    return not record.failure and bool(comparison.times_s(record))


def _tone(comparison: Comparison, record: Record) -> Tone:
    return TONES.get(spoken(comparison, record), "plain")


def _cells(comparison: Comparison, group: list[Record]) -> dict[str, str]:
    """What stands in a row, by the title of the column; empty for a dash."""
    record, score = group[0], _score_title(comparison)
    times_s = comparison.times_s(record)
    gain, memory = comparison.ratio(record), record.memory
    if gain is not None and (math.isinf(gain.high) or record.same_as_baseline):
        gain = None  # too few rounds to say anything, or nothing that could differ
    limit = comparison.share_of_limit(record)
    after = None if record.score is None else record.score.after
    cells = {
        "median": seconds(spread(times_s).median_s) if times_s else "",
        "speed-up": ratio(gain.median) if gain else "",
        INTERVAL: f"{ratio(gain.low)} to {ratio(gain.high)}" if gain else "",
        "first call": "" if record.first_call_s is None else seconds(record.first_call_s),
        "memory": size(memory.peak_bytes) if memory and memory.peak_bytes is not None else "",
        "of limit": "" if limit is None else share(limit),
    }
    for quantity in counted(comparison):
        value = record.quantities.get(quantity.name)
        cells[quantity.title] = "" if value is None else with_unit(value, quantity.unit)
    if score:
        cells[score] = shown(record.score, after.value) if record.score and after else ""
    cells["accuracy"] = _accuracy(record)
    if not _is_timed(comparison, record):
        cells = dict.fromkeys(cells, "")
    names = ", ".join(one.name for one in group)
    return {"variant": names, "verdict": _verdict(comparison, record), **cells}


def _score_title(comparison: Comparison) -> str:
    """The number that the user has named, where there is one."""
    score = comparison.baseline.score
    if score is None:
        return ""
    name = f"{score.function}()" if score.function.isidentifier() else score.function
    return name if len(name) <= LONG else f"{name[: LONG - 1]}…"


def spoken(comparison: Comparison, record: Record) -> str:
    """Return the verdict in words for users."""
    word, gain = comparison.verdict(record), comparison.ratio(record)
    if word in ("slower", "same") and gain is not None and gain.median > NO_GAIN:
        return "no gain"
    return CHANGES if word == "other model" else word


def _accuracy(record: Record) -> str:
    """In a word, with the larger relative error, of outputs and gradients, where it is rounding;
    what another model's outputs are off by is what was given up.
    """
    accuracy = record.accuracy
    if accuracy is None:
        return ""
    error = accuracy.output_error
    if accuracy.verdict == "other model" and error is not None:
        return f"changed {error:.1g}"
    if accuracy.verdict != "rounding" or error is None:
        return "as exact" if accuracy.verdict == "exact" else accuracy.verdict
    return f"rounding {max(error, accuracy.gradient_error or 0):.1g}"


def _verdict(comparison: Comparison, record: Record) -> str:
    """`too noisy`, or `too few rounds`, with what may settle it."""
    verdict = spoken(comparison, record)
    if record.failure:
        return f"{verdict}: {in_short(record)}"
    if not comparison.times_s(record):
        return record.why_not_measured or "not reached: the budget ended before"
    gain = comparison.ratio(record)
    if verdict != "too noisy":
        return verdict
    few = gain is None or (math.isinf(gain.high) and not comparison.busy)
    return f"{'too few rounds' if few else verdict}: {LONGER}"


def reason(record: Record) -> str:
    """Return why there are no times; what declined it is named, unless that is the variant."""
    if not (record.declined and record.declines):
        return record.failure or ""
    if len(record.declines) == 1 and record.name.partition(":")[0] in record.declines:
        return next(iter(record.declines.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in record.declines.items())


def in_short(record: Record) -> str:
    """Return the first clause of the reason; the whole of it stands below the table."""
    first = re.split(r"; | \(|\. ", reason(record))[0]
    return first if len(first) <= SHORT else f"{first[: SHORT - 1].rstrip()}…"
