"""The state of each variant while a benchmark runs: the rows of the progress table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record

WORDS = {"too noisy": "not clear yet", "not checked": "not clear yet"}


@dataclass(frozen=True)
class VariantStatus:
    """One variant so far: `speedup` over baseline with its interval, None where there is none yet,
    and its state in a word.
    """

    name: str
    speedup: float | None
    low: float | None
    high: float | None
    state: str


def statuses(comparison: Comparison) -> tuple[VariantStatus, ...]:
    """Return a row for each variant of a benchmark that is not finished."""
    return tuple(_status(comparison, record) for record in comparison.records)


def _status(comparison: Comparison, record: Record) -> VariantStatus:
    verdict, ratio = comparison.verdict(record), comparison.ratio(record)
    state = WORDS.get(verdict, verdict)
    if record.same_as_baseline:
        return VariantStatus(record.name, None, None, None, "changes nothing")
    if ratio is None or verdict in ("failed", "declined"):
        has_state = record is comparison.baseline or record.failure
        return VariantStatus(record.name, None, None, None, state if has_state else "waiting")
    left = len(record.times_s) < len(comparison.baseline.times_s)
    if verdict != "wrong" and left:
        state = "left the rounds"
    if not ratio.is_bounded:
        state = state if left or verdict == "wrong" else "measuring"
        return VariantStatus(record.name, ratio.median, None, None, state)
    return VariantStatus(record.name, ratio.median, ratio.low, ratio.high, state)
