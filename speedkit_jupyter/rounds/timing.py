"""Time a step without variants, as `%timeit` does: several runs, each of several loops."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median, pstdev
from typing import Any

import torch

from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget, graphs
from speedkit_jupyter.rounds.busy_machine import Interruptions, held_up
from speedkit_jupyter.rounds.comparison import Progress, Shown
from speedkit_jupyter.rounds.statistics import least_values, median_interval
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step.step import Step, reports_out_of_data
from speedkit_jupyter.step.watching import UNCOMPARED, compared_runs, ended, is_suspicious
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.units import WIDE
from speedkit_jupyter.torchglue import interrupts

# Fewest runs from which the median's interval can be computed.
LEAST_RUNS = least_values()
# Default number of runs: at least 7, as in %timeit, and at least one more than LEAST_RUNS.
RUNS = max(7, LEAST_RUNS + 1)


class Stopwatch:
    """Measure the seconds `wall_s` from `begin()` to `end()`, with an idle device at both moments.

    `waited_s` is the longest possible delay by other processes in this time.
    """

    def __init__(
        self, device: torch.device, timer: Callable[[], float], interruptions: Interruptions
    ) -> None:
        self._device, self._timer, self._interruptions = device, timer, interruptions
        self.wall_s = self.waited_s = 0.0

    def begin(self) -> None:
        synchronize(self._device)
        self._interruptions.begin()
        self._start = self._timer()

    def end(self) -> None:
        end_s = self._timer()  # read first, because an empty block takes nanoseconds
        if self._device.type != "cpu":
            synchronize(self._device)
            end_s = self._timer()
        self.wall_s = end_s - self._start
        self.waited_s = self._interruptions.seconds(self.wall_s)


# A function that runs the given number of steps between the stopwatch's `begin` and `end`.
Loop = Callable[[int, Stopwatch], object]


@dataclass(repr=False)
class Timing(Shown):
    """The times of a step, with the attributes of `%timeit -o`; `all_runs` are seconds per run."""

    REPORT = "speedkit_jupyter.report.comparison_report:timing_report"

    loops: int = 1
    all_runs: list[float] = field(default_factory=list)
    first_call_s: float | None = None  # None if every call belongs to a run
    compile_time: float = 0.0
    precision: int = 3
    repeats: str = ""  # a line about later calls that do less work or fail
    waited_runs: list[float] = field(default_factory=list)  # possible delays by other processes
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def repeat(self) -> int:
        return len(self.all_runs)

    @property
    def timings(self) -> list[float]:
        return [run / self.loops for run in self.all_runs]

    best = property(lambda self: min(self.timings), doc="Return the fastest run, per loop.")
    worst = property(lambda self: max(self.timings), doc="Return the slowest run, per loop.")
    average = property(lambda self: fmean(self.timings), doc="Return the mean, per loop.")
    stdev = property(lambda self: pstdev(self.timings), doc="Return the standard deviation.")
    median_s = property(lambda self: median(self.timings), doc="Return the median, per loop.")

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Return the median's distribution-free interval; None if it is too wide, or runs are few.

        The low end excludes waiting time, but is at least `best`.
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
        """Return a sentence about runs delayed by other processes; empty if few were."""
        return held_up([(self.all_runs, self.waited_runs)], "runs")

    def rows(self) -> list[dict[str, Any]]:
        (row,) = self.to_dict()["variants"]
        return [{key: value for key, value in row.items() if key != "times_s"}]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `variants` has one row, where a comparison has several."""
        low, high = self.interval_s or (None, None)
        row = {
            "name": "cell",
            "median_s": self.median_s,
            "first_call_s": self.first_call_s,
            "loops": self.loops,
            "low_s": low,
            "high_s": high,
            **{f"{name}_s": getattr(self, name) for name in ("average", "stdev", "best", "worst")},
            "times_s": self.timings,
        }
        return {
            "variants": [row],
            "environment": dict(self.environment),
            "command": self.command,
            "all_runs_s": self.all_runs,
            "repeats": self.repeats,
            "busy": self.busy,
        }


@dataclass
class Timer:
    """Time a step: drain `run()`, then read `timing`.

    By default there are RUNS runs of 0.2 s or more. With `budget_s` and without `runs`, runs fill
    the budget, which starts at `begun_s` (default: now). A short budget gets fewer or shorter runs.
    """

    step: Step
    loop: Loop
    device: torch.device
    timing: Timing
    loops: int | None = None
    runs: int | None = None
    budget_s: float | None = None
    timer: Callable[[], float] = field(default_factory=lambda: time.perf_counter)
    begun_s: float = field(default_factory=clock.now)
    _budget: Budget = field(default_factory=lambda: Budget(math.inf), init=False, repr=False)
    _interruptions: Interruptions = field(default_factory=Interruptions, init=False, repr=False)

    def result(self) -> Timing:
        return self.timing

    def has_results(self) -> bool:
        return bool(self.timing.all_runs)

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yield progress. Restore the user's state at the end."""
        is_exact, afresh = self.loops is not None and self.runs is not None, False
        budget_s = math.inf if is_exact or not self.budget_s else self.budget_s
        with self.step.guarded() as guard:
            state = guard.state
            # Restoring the state takes as long as copying it.
            self._budget = Budget(budget_s, begun_s=self.begun_s, reserved_s=guard.taking_s)
            if not is_exact:
                yield Progress(0.0, "first call")
                before, first = graphs(), self._once(1)
                if graphs() > before:
                    self._budget.exclude(first.wall_s)
                if not self._budget.allows(0.0):  # one run must suffice
                    self._note(first)
                    yield Progress(1.0, "the budget was short: one run")
                    return
                self.timing = replace(self.timing, first_call_s=first.wall_s)
                state = self.step.state()  # includes optimizer state; taken after compiling
                afresh = self.loops is None and self._begins_afresh(guard.state)
                state = guard.state if afresh else state
            loops = self.loops or (1 if afresh else (yield from self._autorange(state)))
            self.timing = replace(self.timing, loops=loops)
            yield from self._runs(state, settles=not is_exact and not afresh)

    def _runs(self, state: Snapshot, settles: bool) -> Iterator[Progress]:
        """Time runs from one state; if `settles` and time allows, each after an untimed step."""
        slowest_s, first_s, runs = 0.0, self.timing.first_call_s or 0.0, self.timing.all_runs
        settles &= self.budget_s is None or first_s * RUNS < self.budget_s / RUNS
        least = RUNS if self.runs is None else self.runs
        fills = self.runs is None and self.budget_s is not None  # True if runs fill the budget
        while len(runs) < least or (fills and self._budget.left_s > 0):
            if runs and not self._budget.allows(slowest_s):
                break
            begun_s = clock.now()
            state.restore()
            if settles:
                self._once(1)  # lets caches and clocks settle after the reset
            self._note(self._once(self.timing.loops))
            slowest_s = max(slowest_s, clock.now() - begun_s)
            done = min(len(runs) / max(least, 1), 1.0)
            yield Progress(self._budget.share if self.budget_s else done, f"run {len(runs)}")

    def _note(self, run: Stopwatch) -> None:
        self.timing.all_runs.append(run.wall_s)
        self.timing.waited_runs.append(run.waited_s)

    def _begins_afresh(self, start: Snapshot) -> bool:
        """Make another call; return whether it fails, or does under half the first call's work."""
        step, first_s, does = self.step, self.timing.first_call_s or 0.0, UNCOMPARED
        try:
            later_s = self._once(1).wall_s
            if step.models and is_suspicious(first_s, later_s):
                does = compared_runs(step.models, start, lambda: self._once(1))
        except StepError:
            raise
        except Exception as error:  # a learning-rate schedule may limit the calls
            does = ended(error)
            start.restore()
        self.timing = replace(self.timing, repeats=does.line)
        return does.afresh

    def _autorange(self, state: Snapshot) -> Generator[Progress, None, int]:
        """Return the number of loops: the first of 1, 10, 100 … for which a run takes 0.2 s.

        Return fewer loops if RUNS + 1 such runs don't fit into the budget, or if longer runs fail.
        """
        loops, run_s = 1, self.timing.first_call_s or 0.0
        if self.budget_s is not None and run_s * (RUNS + 1) > self._budget.left_s:
            return loops
        while loops < 10**9:  # far more than any step needs
            state.restore()
            try:
                run_s = self._once(loops).wall_s
            except StepError:
                raise
            except Exception:
                if loops == 1:
                    raise
                return loops // 10  # the last number without an error
            if run_s >= 0.2 or 10 * run_s * (RUNS + 1) > self._budget.left_s:
                break
            loops *= 10
            yield Progress(0.0, f"{loops} loops a run")
        return loops

    @reports_out_of_data
    def _once(self, loops: int) -> Stopwatch:
        """Run `loops` steps without garbage collection, as in `timeit`; return the stopwatch."""
        watch, collects = Stopwatch(self.device, self.timer, self._interruptions), gc.isenabled()
        self.step.rewind()
        gc.disable()
        try:
            interrupts.in_a_window(partial(self.loop, loops, watch))
        finally:
            if collects:
                gc.enable()
        return watch


def device_of(step: Step) -> torch.device:
    """Return the device of the first parameter not on `meta`, else the accelerator or the CPU."""
    parameters = (parameter for model in step.models for parameter in model.parameters())
    # Offloaded parameters are on `meta`; a library loads them onto a device that it chooses.
    if (own := next((one.device for one in parameters if not one.is_meta), None)) is not None:
        return own
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found
