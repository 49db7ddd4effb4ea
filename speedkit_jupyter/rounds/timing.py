"""The result of timing a cell without variants, with the attributes of `%timeit -o`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.statistics import SAME, TICK_S, held_up, least_values, median_interval
from speedkit_jupyter.support.units import WIDE

# Fewer runs can't bound a median.
LEAST_RUNS = least_values()


@dataclass(repr=False)
class Timing(Shown):
    """The attributes of `%timeit -o`, and more, in seconds; the seconds of a run are for all loops.

    `cpu_runs` are CPU seconds over all cores, `waited_runs` those in which other processes may have
    held a run up, `device_runs` those between two events of the device. `repeats` says what is
    measured if a later call does less, `unreached` what of a plan in force did not act.
    `first_call_s` is None where every call belongs to a run.
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
        """Return how many runs there were."""
        return len(self.all_runs)

    @property
    def timings(self) -> list[float]:
        """Return the seconds of one loop, run by run."""
        return [run / self.loops for run in self.all_runs]

    @property
    def best(self) -> float:
        """Return the seconds of the fastest run, per loop."""
        return min(self.timings)

    @property
    def worst(self) -> float:
        """Return the seconds of the slowest run, per loop."""
        return max(self.timings)

    @property
    def average(self) -> float:
        """Return the mean over the runs, per loop."""
        return fmean(self.timings)

    @property
    def stdev(self) -> float:
        """Return the standard deviation over the runs, per loop."""
        return pstdev(self.timings)

    @property
    def median_s(self) -> float:
        """Return the median over the runs, per loop."""
        return median(self.timings)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Return the median's distribution-free interval, with waiting and without it, within what
        was measured; None if it is too wide.
        """
        if self.repeat < LEAST_RUNS:
            return None
        waits = zip(self.timings, self.waited_runs, strict=False)
        shortest = [seconds - waited / self.loops for seconds, waited in waits] or self.timings
        low = max(median_interval(shortest)[1], self.best)
        high = median_interval(self.timings)[2]
        return (low, high) if high <= WIDE * low else None

    @property
    def busy(self) -> str:
        """Return how much other processes held up the runs; empty if hardly."""
        runs = list(zip(self.all_runs, self.waited_runs, strict=False))
        interrupted = [waited > SAME * seconds for seconds, waited in runs]
        share = sum(self.waited_runs) / max(sum(self.all_runs), TICK_S)
        return held_up(interrupted, "runs", share)

    @property
    def cpu_s(self) -> float:
        """Return the median CPU seconds per loop, over all cores."""
        return median(self.cpu_runs) / self.loops

    @property
    def device_s(self) -> float | None:
        """Return the median seconds on the device per loop; None without its events."""
        return median(self.device_runs) / self.loops if self.device_runs else None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row: the seconds of one loop, without the runs."""
        (row,) = self.to_dict()["variants"]
        return [{key: value for key, value in row.items() if key != "times_s"}]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `variants` has one record, so that a history can compare it."""
        low, high = self.interval_s or (None, None)
        named = ("median_s", "cpu_s", "device_s", "first_call_s", "loops")
        per_loop = ("average", "stdev", "best", "worst")
        row = {
            "name": "cell",
            **{name: getattr(self, name) for name in named},
            "low_s": low,
            "high_s": high,
            **{f"{name}_s": getattr(self, name) for name in per_loop},
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
