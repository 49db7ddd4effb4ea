"""The result: samples a second and peak memory, batch size by batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.rounds import statistics
from speedkit_jupyter.rounds.presentable import Shown

# The knee is the smallest size that gives this share of the most samples a second.
KNEE = 0.95


@dataclass
class Size:
    """One batch size: `times_s` are seconds of a step of `samples`, one for each round, `first_s`
    those of an early call; `received` is how much its model was seen to receive; `peak_bytes` is
    its fullest moment; `why_not` where it was not measured.
    """

    number: int
    samples: int = 0
    received: int = 0
    first_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    why_not: str = ""

    @property
    def each_s(self) -> list[float]:
        """Seconds of one sample, one for each round."""
        return [taken_s / self.samples for taken_s in self.times_s]

    @property
    def rate(self) -> float:
        """Samples a second, by the median; 0 where it was not measured."""
        taken_s = statistics.median_interval(self.times_s)[0] if self.times_s else self.first_s
        return self.samples / taken_s if taken_s else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the rate, at 95 %; None from fewer calls than can give one."""
        if len(self.times_s) < statistics.least_values():
            return None
        _, low_s, high_s = statistics.median_interval(self.times_s)
        return self.samples / high_s, self.samples / low_s


@dataclass(repr=False)
class BatchSizes(Shown):
    """`sizes` from the smallest to the largest. `now` is the size of the step's own batches, which
    are `source`. `largest` fits into `available_bytes` with a margin, if memory grows evenly.
    """

    REPORTS = f"{__package__}.report"

    subject: str
    now: int = 0
    source: str = ""
    sizes: list[Size] = field(default_factory=list)
    largest: int | None = None
    available_bytes: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def measured(self) -> list[Size]:
        return [size for size in self.sizes if size.first_s]

    @property
    def fastest(self) -> Size:
        return max(self.measured, key=lambda size: size.rate)

    @property
    def knee(self) -> Size:
        """The smallest that is nearly as fast as the fastest."""
        return next(size for size in self.measured if self._is_near(size))

    @property
    def is_proven(self) -> bool:
        """Whether every size that is not nearly as fast as the fastest is proven to be slower."""
        best, others = self.fastest, [one for one in self.measured if not self._is_near(one)]
        if len(self.measured) == 1 or best.interval is None:
            return False
        error = statistics.bonferroni_share(statistics.ERROR, len(others))
        return all(
            statistics.paired_ratio(one.each_s, best.each_s, error).low > 1 for one in others
        )

    def _is_near(self, size: Size) -> bool:
        return size.rate >= KNEE * self.fastest.rate

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "batch": size.number,
                "step_s": size.samples / size.rate if size.rate else None,
                "samples_per_s": size.rate or None,
                "low": size.interval and size.interval[0],
                "high": size.interval and size.interval[1],
                "peak_bytes": size.peak_bytes,
                "note": size.why_not,
            }
            for size in self.sizes
        ]

    def to_dict(self) -> dict[str, Any]:
        proven = bool(self.measured) and self.is_proven
        names = ("subject", "source", "now", "largest", "available_bytes", "command")
        return {
            **{name: getattr(self, name) for name in names},
            "rows": self.rows(),
            "fastest": self.fastest.number if proven else None,
            "knee": self.knee.number if proven else None,
            "environment": dict(self.environment),
        }
