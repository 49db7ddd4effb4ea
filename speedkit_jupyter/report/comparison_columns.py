"""The columns of a benchmark's table: one entry each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from speedkit_jupyter.measure.checks import counted_columns
from speedkit_jupyter.measure.checks.counted_columns import Quantity
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import INTERVAL, Ratio, spread
from speedkit_jupyter.measure.rounds.budget import advice
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


@dataclass(frozen=True)
class Column:
    """A title, and what stands below it: None for a dash.

    Where the text is too narrow, columns leave in the order of `leaves`, 1 first; 0 stays. One
    that `is_brief` stands beside the controls of a panel, too.
    """

    title: str
    cell: Callable[[Comparison, Record], str | None]
    is_number: bool = True
    wraps: bool = False
    leaves: int = 0
    is_brief: bool = False


def comparison_table(comparison: Comparison, is_brief: bool = False) -> Table:
    """A row for each variant; those without times share one for each reason.

    A column with nothing in it is left out.
    """
    columns = [column for column in _columns(comparison) if column.is_brief or not is_brief]
    groups = _groups(comparison)
    every = {column.title: [_cell(comparison, group, column) for group in groups]
             for column in columns}  # fmt: skip
    columns = [column for column in columns if any(every[column.title])]
    rows = [
        Row(
            tuple(every[column.title][number] or BLANK for column in columns),
            TONES.get(spoken(comparison, group[0]), "plain"),
        )
        for number, group in enumerate(groups)
    ]
    leaving = sorted(
        (column for column in columns if column.leaves), key=lambda column: -column.leaves
    )
    return Table(
        tuple(column.title for column in columns),
        tuple(rows),
        numbers=tuple(column.title for column in columns if column.is_number),
        wraps=tuple(column.title for column in columns if column.wraps),
        optional=tuple(column.title for column in leaving),
    )


def counted(comparison: Comparison) -> list[Quantity]:
    """What this machine counts beside the times."""
    names = {name for record in comparison.records for name in record.quantities}
    every = (each for one in counted_columns.QUANTITIES for each in (one, one.of_a_sample))
    return [quantity for quantity in every if quantity.name in names]


def _columns(comparison: Comparison) -> list[Column]:
    """With those of what this machine counts beside the times."""
    more = [*map(_column, counted(comparison)), *_of_score(comparison)]
    place = next(n for n, column in enumerate(COLUMNS) if column.title == "accuracy")
    return [*COLUMNS[:place], *more, *COLUMNS[place:]]


def _column(quantity: Quantity) -> Column:
    def cell(comparison: Comparison, record: Record) -> str | None:
        value = record.quantities.get(quantity.name)
        return None if value is None else with_unit(value, quantity.unit)

    return Column(quantity.title, cell, leaves=3)


def _of_score(comparison: Comparison) -> list[Column]:
    """The number that the user has named, where there is one."""
    score = comparison.baseline.score
    if score is None:
        return []

    def cell(comparison: Comparison, record: Record) -> str | None:
        after = None if record.score is None else record.score.after
        return None if record.score is None or after is None else shown(record.score, after.value)

    name = f"{score.function}()" if score.function.isidentifier() else score.function
    title = name if len(name) <= LONG else f"{name[: LONG - 1]}…"
    return [Column(title, cell, is_brief=True)]


def _groups(comparison: Comparison) -> list[list[Record]]:
    """Each record that has times alone; the others together with those of the same reason."""
    groups: dict[str, list[Record]] = {}
    for record in comparison.records:
        alone = not record.failure and comparison.times_s(record)
        key = str(id(record)) if alone else _verdict(comparison, record)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _cell(comparison: Comparison, group: list[Record], column: Column) -> str | None:
    record = group[0]
    if column is NAME:
        return ", ".join(record.name for record in group)
    if column is not VERDICT and (record.failure or not comparison.times_s(record)):
        return None
    return column.cell(comparison, record)


def spoken(comparison: Comparison, record: Record) -> str:
    """The verdict in words for users."""
    word, gain = comparison.verdict(record), comparison.ratio(record)
    if word in ("slower", "same") and gain is not None and gain.median > NO_GAIN:
        return "no gain"
    return CHANGES if word == "other model" else word


def _median(comparison: Comparison, record: Record) -> str | None:
    times_s = comparison.times_s(record)
    return seconds(spread(times_s).median_s) if times_s else None


def _known(comparison: Comparison, record: Record) -> Ratio | None:
    """None with too few rounds to say anything, or nothing that could differ."""
    gain = comparison.ratio(record)
    return None if gain is None or math.isinf(gain.high) or record.same_as_baseline else gain


def _speedup(comparison: Comparison, record: Record) -> str | None:
    gain = _known(comparison, record)
    return ratio(gain.median) if gain else None


def _interval(comparison: Comparison, record: Record) -> str | None:
    gain = _known(comparison, record)
    return f"{ratio(gain.low)} to {ratio(gain.high)}" if gain else None


def _first_call(comparison: Comparison, record: Record) -> str | None:
    return None if record.first_call_s is None else seconds(record.first_call_s)


def _peak(comparison: Comparison, record: Record) -> str | None:
    """None where it was not asked, or where the device can't tell."""
    peak = None if record.memory is None else record.memory.peak_bytes
    return None if peak is None else size(peak)


def _of_limit(comparison: Comparison, record: Record) -> str | None:
    limit = comparison.share_of_limit(record)
    return None if limit is None else share(limit)


def _accuracy(comparison: Comparison, record: Record) -> str | None:
    """In a word, with the larger relative error, of outputs and gradients, where it is rounding;
    what another model's outputs are off by is what was given up.
    """
    accuracy = record.accuracy
    if accuracy is None:
        return None
    error = accuracy.output_error
    if accuracy.verdict == "other model" and error is not None:
        return f"changed {error:.1g}"
    if accuracy.verdict != "rounding" or error is None:
        return "as exact" if accuracy.verdict == "exact" else accuracy.verdict
    return f"rounding {max(error, accuracy.gradient_error or 0):.1g}"


def _verdict(comparison: Comparison, record: Record) -> str:
    """`too noisy`, or `too few rounds`, with the budget that would settle it."""
    verdict = spoken(comparison, record)
    if record.failure:
        return f"{verdict}: {in_short(record)}"
    if not comparison.times_s(record):
        return record.why_not_measured or "not reached: the budget ended before"
    needed, gain = comparison.seconds_needed(record), comparison.ratio(record)
    if verdict != "too noisy":
        return verdict
    few = gain is None or (math.isinf(gain.high) and not comparison.busy)
    word = "too few rounds" if few else verdict
    if needed is None:
        return word
    return f"{word}: {advice(1.5 * needed, 'may settle it', 'settling it', comparison.budget_s)}"


def reason(record: Record) -> str:
    """Why there are no times; what declined it is named where it is not the variant itself."""
    if not (record.declined and record.declines):
        return record.failure or ""
    if len(record.declines) == 1 and record.name.partition(":")[0] in record.declines:
        return next(iter(record.declines.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in record.declines.items())


def in_short(record: Record) -> str:
    """The first clause of the reason; the whole of it stands below the table."""
    first = re.split(r"; | \(|\. ", reason(record))[0]
    return first if len(first) <= SHORT else f"{first[: SHORT - 1].rstrip()}…"


NAME = Column("variant", lambda _, r: r.name, is_number=False, wraps=True, is_brief=True)
VERDICT = Column("verdict", _verdict, is_number=False, wraps=True, is_brief=True)
COLUMNS = (
    NAME,
    VERDICT,
    Column("median", _median, is_brief=True),
    Column("speed-up", _speedup, is_brief=True),
    Column(INTERVAL, _interval, wraps=True, is_brief=True),
    Column("first call", _first_call, leaves=2),
    Column("memory", _peak, leaves=3),
    Column("of limit", _of_limit, leaves=1),
    Column("accuracy", _accuracy, is_number=False, wraps=True, is_brief=True),
)
