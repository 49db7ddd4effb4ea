"""Where each variant stands while a benchmark runs: what progress shows, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speedkit_jupyter.measure.results.comparison import Comparison
    from speedkit_jupyter.measure.results.record import Record

WORDS = {"too noisy": "not clear yet", "failed": "failed", "wrong": "wrong"}


@dataclass(frozen=True)
class Standing:
    """One variant so far: `speedup` over baseline with its interval, None where there is none yet,
    and its state in a word.
    """

    name: str
    speedup: float | None
    low: float | None
    high: float | None
    state: str


def standings(comparison: Comparison) -> tuple[Standing, ...]:
    """Every variant of a benchmark that is not finished."""
    return tuple(_standing(comparison, record) for record in comparison.records)


def _standing(comparison: Comparison, record: Record) -> Standing:
    verdict, ratio = comparison.verdict(record), comparison.ratio(record)
    state = WORDS.get(verdict, verdict)
    if record.same_as_baseline:
        return Standing(record.name, None, None, None, "changes nothing")
    if ratio is None or verdict in ("failed", "declined"):
        has_state = record is comparison.baseline or record.failure
        return Standing(record.name, None, None, None, state if has_state else "waiting")
    left = len(record.times_s) < len(comparison.baseline.times_s)
    if verdict != "wrong" and left:
        state = "left the rounds"
    if math.isinf(ratio.high) or ratio.low <= 0:
        state = state if left or verdict == "wrong" else "measuring"
        return Standing(record.name, ratio.median, None, None, state)
    return Standing(record.name, ratio.median, ratio.low, ratio.high, state)
