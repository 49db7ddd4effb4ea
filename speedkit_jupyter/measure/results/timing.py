"""What timing a cell as it stands found: what `%timeit -o` gives, and more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.statistics import (
    SAME,
    TICK_S,
    WIDE,
    held_up,
    least_values,
    median_interval,
)

# Fewer runs can't bound a median.
LEAST_RUNS = least_values()


@dataclass(repr=False)
class Timing(Shown):
    """The result: what `%timeit -o` gives, and more. Seconds; those of a run are for all its loops.

    `cpu_runs` are CPU seconds of each run over all cores, `waited_runs` those in which other
    processes may have held it up, `device_runs` seconds between two CUDA
    events (empty elsewhere). `repeats` says what is measured where a later call does less than the
    first, `unreached` what of a plan in force did not act. `first_call_s` is None where every call
    belongs to a run.
    """

    loops: int = 1
    all_runs: list[float] = field(default_factory=list)
    cpu_runs: list[float] = field(default_factory=list)
    device_runs: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    compile_time: float = 0.0
    precision: int = 3
    repeats: str = ""
    waited_runs: list[float] = field(default_factory=list)
    unreached: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def repeat(self) -> int:
        """How many runs there were."""
        return len(self.all_runs)

    @property
    def timings(self) -> list[float]:
        """Seconds of one loop, run by run."""
        return [run / self.loops for run in self.all_runs]

    @property
    def best(self) -> float:
        """The fastest run, per loop."""
        return min(self.timings)

    @property
    def worst(self) -> float:
        """The slowest run, per loop."""
        return max(self.timings)

    @property
    def average(self) -> float:
        """The mean over the runs, per loop."""
        return math.fsum(self.timings) / self.repeat

    @property
    def stdev(self) -> float:
        """The standard deviation over the runs, per loop."""
        mean = self.average
        return math.sqrt(math.fsum((seconds - mean) ** 2 for seconds in self.timings) / self.repeat)

    @property
    def median_s(self) -> float:
        """The median over the runs, per loop."""
        return median_interval(self.timings)[0]

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The distribution-free interval of the median; None where the runs were too few, or so
        disturbed that it says nothing.

        As wide as it is where each run may be shorter by its waiting.
        """
        if self.repeat < LEAST_RUNS:
            return None
        waits = zip(self.timings, self.waited_runs, strict=False)
        shortest = [seconds - waited / self.loops for seconds, waited in waits] or self.timings
        low, high = median_interval(shortest)[1], median_interval(self.timings)[2]
        return (low, high) if high <= WIDE * low else None

    @property
    def busy(self) -> str:
        """How much other processes held up the runs, in a line; empty where they hardly did."""
        runs = list(zip(self.all_runs, self.waited_runs, strict=False))
        interrupted = [waited > SAME * seconds for seconds, waited in runs]
        share = sum(self.waited_runs) / max(sum(self.all_runs), TICK_S)
        return held_up(interrupted, "runs", share)

    @property
    def cpu_s(self) -> float:
        """Median CPU seconds per loop, over all cores."""
        return median_interval(self.cpu_runs)[0] / self.loops

    @property
    def device_s(self) -> float | None:
        """Median seconds on the device per loop; None without CUDA events."""
        return median_interval(self.device_runs)[0] / self.loops if self.device_runs else None

    def rows(self) -> list[dict[str, Any]]:
        """One: the seconds of one loop, without those of each run."""
        (row,) = self.to_dict()["variants"]
        return [{key: value for key, value in row.items() if key != "times_s"}]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `variants` has one record, so that a history can compare it."""
        low, high = self.interval_s or (None, None)
        row = {
            "name": "cell",
            "median_s": self.median_s,
            "low_s": low,
            "high_s": high,
            "average_s": self.average,
            "stdev_s": self.stdev,
            "best_s": self.best,
            "worst_s": self.worst,
            "cpu_s": self.cpu_s,
            "device_s": self.device_s,
            "first_call_s": self.first_call_s,
            "loops": self.loops,
            "times_s": self.timings,
        }
        return {
            "variants": [row],
            "environment": dict(self.environment),
            "command": self.command,
            "all_runs_s": self.all_runs,
            "cpu_runs_s": self.cpu_runs,
            "device_runs_s": self.device_runs,
            "compile_time_s": self.compile_time,
            "repeats": self.repeats,
            "busy": self.busy,
        }
