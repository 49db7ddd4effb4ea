"""What a benchmark found: one record per variant."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.accuracy import Accuracy
from speedkit_jupyter.measure.statistics import Ratio, Word, paired_ratio, pairs_needed, spread


@dataclass
class Record:
    """One variant. Times are seconds of one step, in the order of the rounds."""

    name: str
    times_s: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    failure: str | None = None
    accuracy: Accuracy | None = None
    same_as_baseline: bool = False
    applied: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The result of a benchmark. The first record is what the others are compared with."""

    records: tuple[Record, ...]
    environment: dict[str, Any]
    budget_s: float
    looks: int = 1
    round_s: float | None = None

    @property
    def baseline(self) -> Record:
        """The variant that the ratios refer to."""
        return self.records[0]

    def ratio(self, record: Record) -> Ratio | None:
        """Baseline time over this variant's, round by round; None where one has no times."""
        if record.same_as_baseline:
            return Ratio(1.0, 1.0, 1.0, len(self.baseline.times_s))
        pairs = min(len(self.baseline.times_s), len(record.times_s))
        if record is self.baseline or record.failure or not pairs:
            return None
        return paired_ratio(
            self.baseline.times_s[:pairs],
            record.times_s[:pairs],
            comparisons=len(self.records) - 1,
            looks=self.looks,
        )

    def verdict(self, record: Record) -> Word:
        """One word for the variant."""
        if record.failure:
            return "failed"
        if record.accuracy is not None and record.accuracy.verdict == "wrong":
            return "wrong"
        if record is self.baseline:
            return "baseline"
        ratio = self.ratio(record)
        return "too noisy" if ratio is None else ratio.verdict

    def times_s(self, record: Record) -> list[float]:
        """Its own times, or the baseline's where its plan is the baseline's."""
        return self.baseline.times_s if record.same_as_baseline else record.times_s

    def seconds_needed(self, record: Record) -> float | None:
        """About how long a run would have to be for a verdict on this variant."""
        ratio = self.ratio(record)
        pairs = None if ratio is None else pairs_needed(ratio)
        return None if pairs is None or self.round_s is None else pairs * self.round_s

    def too_few_rounds(self) -> bool:
        """Whether the budget allowed fewer rounds than an interval needs."""
        ratios = [self.ratio(one) for one in self.records]
        return any(one is not None and math.isinf(one.high) for one in ratios)

    def settled(self) -> bool:
        """Whether every variant has a clear verdict and a narrow interval."""
        ratios = [self.ratio(one) for one in self.records if not one.failure]
        return all(ratio.settled for ratio in ratios if ratio is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `variants` is a list of records."""
        return {
            "variants": [self._row(record) for record in self.records],
            "environment": self.environment,
            "budget_s": self.budget_s,
            "looks": self.looks,
            "round_s": self.round_s,
        }

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def _row(self, record: Record) -> dict[str, Any]:
        ratio = self.ratio(record)
        seconds = self.times_s(record)
        times = spread(seconds) if seconds else None
        return {
            "name": record.name,
            "verdict": self.verdict(record),
            "speedup": None if ratio is None else ratio.median,
            "low": None if ratio is None else ratio.low,
            "high": None if ratio is None or ratio.high == float("inf") else ratio.high,
            "median_s": None if times is None else times.median_s,
            "quartiles_s": None if times is None else [times.low_s, times.high_s],
            "first_call_s": record.first_call_s,
            "failure": record.failure,
            "accuracy": None if record.accuracy is None else record.accuracy.to_dict(),
            "applied": record.applied,
            "notes": record.notes,
            "times_s": list(seconds),
        }
