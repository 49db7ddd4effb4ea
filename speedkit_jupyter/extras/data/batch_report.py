"""The result of a sweep of batch sizes, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from speedkit_jupyter.report.elements import BLANK, Row, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds import statistics
from speedkit_jupyter.rounds.comparison import Shown
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import seconds, share

# The knee is the smallest size with at least this share of the highest samples per second.
KNEE = 0.95
OUT = "out of memory: everything was put back"
TOO_LARGE = "would not fit, judging by the memory of smaller sizes"
REMARKS = (
    "Samples are repeated if there are too few; loading is not timed. Another batch size is "
    "another training: tune the learning rate again. Nothing was changed."
)


@dataclass
class Size:
    """The measurements of batches of `number` samples."""

    number: int
    first_s: float = 0.0  # the faster of two early calls
    times_s: list[float] = field(default_factory=list)  # mean seconds of a step, by round
    peak_bytes: int | None = None
    why_not: str = ""  # the reason for not measuring the size

    @property
    def rate(self) -> float:
        """Return the median samples per second; 0 if the size was not measured."""
        taken_s = median(self.times_s or [self.first_s])
        return self.number / taken_s if taken_s else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of samples per second, or None with too few rounds."""
        if len(self.times_s) < statistics.least_values():
            return None
        _, low_s, high_s = statistics.median_interval(self.times_s)
        return self.number / high_s, self.number / low_s


@dataclass(repr=False)
class BatchSizes(Shown):
    """The result of a sweep: `sizes`, the smallest first; `now` is the size of the user's batch."""

    REPORT = f"{__name__}:batch_report"

    subject: str
    now: int = 0
    sizes: list[Size] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def measured(self) -> list[Size]:
        return [size for size in self.sizes if size.first_s]

    @property
    def largest(self) -> int | None:
        is_known = self.measured and self.sizes[-1].why_not in (OUT, TOO_LARGE)
        return self.measured[-1].number if is_known else None

    @property
    def fastest(self) -> Size:
        return max(self.measured, key=lambda size: size.rate)

    @property
    def knee(self) -> Size:
        """Return the smallest size with at least the share KNEE of the fastest rate."""
        return next(size for size in self.measured if self._is_near(size))

    @property
    def is_proven(self) -> bool:
        """Return whether all sizes below the share KNEE of the fastest rate are proven slower."""
        best = self.fastest
        if len(self.measured) == 1 or best.interval is None:
            return False
        slower = [one for one in self.measured if not self._is_near(one)]
        error = statistics.bonferroni_share(statistics.ERROR, len(slower))
        number = min(len(one.times_s) for one in self.measured)  # Ctrl-C may have ended a round
        of = {one.number: [s / one.number for s in one.times_s[:number]] for one in self.measured}
        pairs = [(of[one.number], of[best.number]) for one in slower]
        return all(statistics.paired_ratio(*pair, error).low > 1 for pair in pairs)

    def _is_near(self, size: Size) -> bool:
        return size.rate >= KNEE * self.fastest.rate

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "batch": size.number, "step_s": size.number / size.rate if size.rate else None,
                "samples_per_s": size.rate or None, "low": size.interval and size.interval[0],
                "high": size.interval and size.interval[1], "peak_bytes": size.peak_bytes,
                "note": size.why_not,
            }
            for size in self.sizes
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        plain, proven = ("subject", "now", "largest", "command", "environment"), self.is_proven
        return {
            **{name: getattr(self, name) for name in plain},
            "rows": self.rows(),
            "fastest": self.fastest.number if proven else None,
            "knee": self.knee.number if proven else None,
        }


def batch_report(found: BatchSizes) -> Document:
    columns = ("batch", "a step", "samples a second", INTERVAL, "peak memory", "")
    table = Table(columns, [_row(found, one) for one in found.sizes], columns[:-1])
    return Document(_headline(found), [table, REMARKS], found.to_dict())


def _headline(found: BatchSizes) -> str:
    knee, fastest, subject = found.knee, found.fastest, f"`{found.subject}`"
    if len(found.measured) == 1:
        words = f"{subject}: no other batch size than {fastest.number:,} was measured"
    elif not found.is_proven:
        words = f"{subject}: too noisy to say which batch size is the fastest (--budget)"
    else:
        rate = f"{fastest.rate:,.0f} samples a second"
        words = f"{subject}: batches of {fastest.number:,} are the fastest ({rate})"
        if knee is not fastest:
            words += f"; {knee.number:,} give {share(knee.rate / fastest.rate)} of that"
    if found.largest is not None:
        words += f"; {found.largest:,} fit, and {found.sizes[-1].number:,} don't"
    return words


def _row(found: BatchSizes, one: Size) -> Row:
    if not one.first_s:
        return Row((f"{one.number:,}", *[BLANK] * 4, one.why_not), "quiet")
    is_knee, is_fastest = (found.is_proven and one is it for it in (found.knee, found.fastest))
    notes = ["as it is"] * (one.number == found.now) + ["fastest"] * is_fastest
    notes += [f"knee: the smallest with {share(KNEE)} of the fastest"] * is_knee
    cells = (
        f"{one.number:,}",
        seconds(one.number / one.rate),
        f"{one.rate:,.0f}",
        BLANK if one.interval is None else "{:,.0f} to {:,.0f}".format(*one.interval),
        BLANK if one.peak_bytes is None else units.size(one.peak_bytes),
        ", ".join(notes),
    )
    return Row(cells, "good" if is_knee else "plain")
