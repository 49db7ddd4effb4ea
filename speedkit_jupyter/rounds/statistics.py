"""Compute ratios of times, with intervals and verdicts; plan tests and the rounds they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from speedkit_jupyter.support import units

Word = Literal[
    "baseline", "faster", "slower", "same", "too noisy", "other model", "not checked",
    "wrong", "failed", "declined", "above the limit",
]  # fmt: skip

# Error probability of a whole run, with all of its tests and variants. Fewer pairs than LEAST_PAIRS
# get no distribution-free interval.
ERROR, LEAST_PAIRS = 0.05, 8
# The share of ERROR for the test at the end, which decides most small differences; the earlier
# tests share the rest.
LAST_LOOK = 0.5
# With these numbers of pairs, `_far` may use Student's interval: if the interval and all ratios are
# above 1.2, or all below 1/1.2. In simulations of equal code (outliers of 2 to 10 times in up to
# half of all blocks, bursts, drift, Cauchy noise), at most 0.3 % of runs were called faster; 1.9 %
# if other programs started and stopped together with the blocks.
FAR_PAIRS = range(5, 16)
# A run ends early once every verdict is clear and every interval is ± this share at most.
PRECISE = 0.03
# Ratios within this band around 1 count as the same.
SAME = 0.01
# The name of an interval in reports.
INTERVAL = f"{100 * (1 - ERROR):g} % interval"
# Gains differ between processes, because memory addresses differ. PROCESSES is the standard
# deviation of a gain's logarithm, as a share of the logarithm. It was measured in 36 processes of
# six workloads, and in 20 tuned workloads in fresh processes (`tests/benchmarks/processes.py`,
# `oracle.py`; see Kalibera and Jones, 2013). NORMAL is the normal quantile for 95 %, two-sided.
PROCESSES, NORMAL = 0.1, 1.96
# A negligible time of 1 ns, the resolution of the best clocks; also used as a negligible share.
TICK_S = 1e-9


@dataclass(frozen=True)
class Ratio:
    """Baseline time ÷ candidate time: the median over pairs, and its interval."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Word:
        """Return faster or slower if a bounded interval excludes 1, else same or too noisy."""
        if not self.is_bounded:
            return "too noisy"
        if self.low > 1:
            return "faster"
        if self.high < 1:
            return "slower"
        if self.low >= 1 - SAME and self.high <= 1 + SAME:
            return "same"
        return "too noisy"

    @property
    def settled(self) -> bool:
        """Return whether the verdict is clear and the interval narrow enough to end the rounds."""
        return self.verdict != "too noisy" and self.is_precise(PRECISE)

    @property
    def is_bounded(self) -> bool:
        """Return whether the interval is narrow enough to support a conclusion."""
        return self.high <= units.WIDE * self.low

    def unbounded(self) -> Ratio:
        return replace(self, low=0.0, high=math.inf)

    def in_any_process(self, threads: int = 1, step_s: float = math.inf) -> Ratio:
        """Return the ratio with its interval widened by the variation between processes."""
        if not (self.low > 0 and math.isfinite(self.high)):
            return self
        # Short steps on several threads depend on the distance between cores, and hosts move
        # virtual cores. The round trip of a cache line then took 48 or 420 ns. Gains of 1.22 and
        # 1.61 became 0.95 and 2.10, which is a change of up to 0.27 in logarithms.
        middle, distance = math.log(self.median), 0.27 if threads > 1 and step_s < 0.005 else 0.0
        others = NORMAL * PROCESSES * middle, distance
        below = math.hypot(middle - math.log(self.low), *others)
        above = math.hypot(math.log(self.high) - middle, *others)
        return replace(self, low=math.exp(middle - below), high=math.exp(middle + above))

    def __str__(self) -> str:
        """Return `1.50× (1.42× to 1.61×)`, or `about 1.50× in 6 rounds` if unbounded."""
        if not self.is_bounded:
            return f"about {units.ratio(self.median)} in {units.count(self.pairs, 'round')}"
        return f"{units.ratio(self.median)} ({units.between(self.low, self.high)})"

    def to_dict(self) -> dict[str, float | None]:
        """Return plain values; an infinite `high` is None."""
        return {**asdict(self), "high": self.high if math.isfinite(self.high) else None}

    def is_precise(self, share: float) -> bool:
        """Return whether the interval's width is at most `2 * share * median`."""
        return self.high - self.low <= 2 * share * self.median


def paired_ratio(
    baseline_s: Sequence[float],
    candidate_s: Sequence[float],
    error: float = ERROR,
    waited_s: Sequence[Sequence[float]] | None = None,
) -> Ratio:
    """Return the median ratio of times that were paired by round, with its interval.

    The interval is distribution-free (order statistics, by the binomial test), at the level
    1 - `error`. It is unbounded for fewer than `least_pairs(error)` pairs. If no pair is delayed,
    `_far` may give Student's interval instead. `waited_s` has possible delays of baseline and
    candidate. Pairs delayed by over 1 % are dropped if enough pairs remain; else the interval
    covers the ratios with and without delays. The interval is clipped to the measured ratios. It
    is unbounded if it is too wide, or if clipping changes the verdict.
    """
    times = np.array([baseline_s, candidate_s], float)
    waits = np.zeros_like(times) if waited_s is None else np.minimum(waited_s, (1 - TICK_S) * times)
    alone = (waits <= SAME * times).all(0)
    if alone.sum() >= least_pairs(error):
        times, waits = times[:, alone], waits[:, alone]
    longest, shortest = np.log(times), np.log(times - waits)
    median, pairs = float(np.exp(np.median(longest[0] - longest[1]))), times.shape[1]
    rank = order_statistic(pairs, error)
    low, high = _far(longest[0] - longest[1], error) if alone.all() else (0.0, math.inf)
    if not low and pairs >= LEAST_PAIRS and rank:
        ordered = np.sort([longest[0] - longest[1], shortest[0] - shortest[1]], axis=1)
        low, high = np.exp([ordered[:, rank - 1].min(), ordered[:, -rank].max()]).tolist()
    found = Ratio(median, low, high, pairs)
    ratios = times[0] / times[1]
    least, most = float(ratios.min()), float(ratios.max())
    measured = replace(found, low=max(low, least), high=min(high, most))
    is_told = found.is_bounded and measured.verdict == found.verdict
    return measured if is_told else found.unbounded()


def _far(logs: Any, error: float) -> tuple[float, float]:
    """Return Student's interval for the geometric mean; 0 and infinity where it can't be trusted.

    It is trusted if FAR_PAIRS has the number of pairs, and the interval and all pairs are far from
    1. The median must be near the mean: otherwise the times may be a mixture of two states.
    """
    from scipy.special import stdtrit

    if (pairs := len(logs)) not in FAR_PAIRS:
        return 0.0, math.inf
    # A standard deviation counts as at least 1 %.
    scatter, middle = max(float(logs.std(ddof=1)), 0.01), float(logs.mean())
    half = -float(stdtrit(pairs - 1, error / 2)) * scatter / math.sqrt(pairs)
    is_far = min(abs(middle) - half, (logs * np.sign(middle)).min()) > math.log(1.2)
    if not is_far or abs(float(np.median(logs)) - middle) > half / 2:
        return 0.0, math.inf
    return math.exp(middle - half), math.exp(middle + half)


def bonferroni_share(error: float, comparisons: int) -> float:
    """Return each comparison's error probability, so that the total is at most `error`."""
    return error / max(comparisons, 1)


def least_pairs(error: float) -> int:
    """Return the minimum number of pairs for a distribution-free interval at this error."""
    return max(LEAST_PAIRS, least_values(error))


def least_values(error: float = ERROR) -> int:
    """Return the minimum number of values whose extremes bound the median at this error."""
    return math.ceil(math.log2(2 / error))


def planned_looks(rounds: int, variants: int = 1) -> tuple[int, ...]:
    """Return the rounds after which to test, for a budget of `rounds`, such as 5, 9, 13, 19, 28.

    The first test finds only ratios that are far from 1. From the second test on, there are enough
    pairs for an interval of each variant.
    """
    looks = [LEAST_PAIRS]
    while (later := looks[-1] * 3 // 2) < rounds:
        looks.append(later)
    error = error_of_a_look(1 + len(looks), ended=False)
    more = least_pairs(bonferroni_share(error, variants)) - LEAST_PAIRS
    return (FAR_PAIRS[0], *(look + more for look in looks))


def error_of_a_look(looks: int, ended: bool) -> float:
    """Return the error probability of the last test or, if not `ended`, of each of `looks` tests.

    By Bonferroni's inequality, the probability of an error in the whole run is at most ERROR.
    """
    is_last = ended or not looks
    return ERROR * LAST_LOOK if is_last else bonferroni_share(ERROR * (1 - LAST_LOOK), looks)


def least_rounds(variants: int) -> int:
    """Return the minimum number of rounds for an interval of each variant at the last test."""
    return least_pairs(bonferroni_share(ERROR * LAST_LOOK, variants))


@cache
def order_statistic(number: int, error: float) -> int:
    """Return the rank of the order statistics that bound the median of `number` values.

    The level is 1 - `error`, by the binomial test; the rank is 0 for too few values. Importing
    scipy.stats would take three times as long as scipy.special.
    """
    from scipy.special import bdtr

    return int((bdtr(np.arange(number // 2 + 1), number, 0.5) < error / 2).sum())


def median_interval(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free interval; for too few values, their range."""
    ordered, rank = np.sort(np.asarray(seconds)), order_statistic(len(seconds), ERROR)
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (ordered[0], ordered[-1])
    return float(np.median(ordered)), float(low), float(high)


def percentile_99(times_s: Sequence[float]) -> float:
    """Return the smallest time that at least 99 % of the times do not exceed."""
    return sorted(times_s)[math.ceil(0.99 * len(times_s)) - 1]
