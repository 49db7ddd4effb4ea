"""Estimate how much other programs delayed this one, and describe the delay."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest

import psutil

from speedkit_jupyter.rounds.clock import now
from speedkit_jupyter.rounds.statistics import SAME, TICK_S

# A machine is never completely idle: delays of up to this share of the rounds, or of a step's time,
# don't count. Above this share, reports say BUSY before any figure.
SELDOM, BUSY = 0.1, "the machine was busy"


class Interruptions:
    """Estimate the longest possible delay of this process by other processes.

    Linux counts how long threads waited for a core, but a thread may also wait for other threads of
    this process. The delay is therefore limited to the CPU time of other processes.
    """

    def __init__(self) -> None:
        self._made_s, self._others_s = now(), taken_by_others_s()
        self._total_s = self._read_s = self._share = 0.0
        self.begin()

    def begin(self) -> None:
        self._cpu_s, self._waited_s = time.process_time(), waited_s()

    def seconds(self, wall_s: float) -> float:
        """Return the possible delay during the `wall_s` seconds since `begin()`; 0 if unknown."""
        waiting_s = waited_s() - self._waited_s
        # The CPU time ÷ the number of cores is the least wall time without delays.
        least_s = (time.process_time() - self._cpu_s) / _cores()
        held_up_s = max(min(waiting_s, wall_s - least_s), 0.0)
        self._total_s += held_up_s
        if not held_up_s:
            return 0.0
        elapsed_s = now() - self._made_s
        if elapsed_s - self._read_s >= 0.2:  # /proc has ticks of 0.01 s, and reading takes 2 ms
            self._read_s = elapsed_s
            taken_s = taken_by_others_s() - self._others_s
            # On an idle machine, other processes take up to 5 % of the time, plus 3 clock ticks.
            is_quiet = taken_s < 0.05 * _cores() * elapsed_s + 0.03
            self._share = 0.0 if is_quiet else min(taken_s / self._total_s, 1.0)
        return held_up_s * self._share

    def others_share(self) -> float:
        """Return the share of core time that other processes used since this object's creation."""
        taken_s, elapsed_s = taken_by_others_s() - self._others_s, now() - self._made_s
        return max(taken_s - 0.03, 0.0) / (_cores() * max(elapsed_s, 1e-3))  # 0.03 s: clock ticks


def waited_s() -> float:
    """Return the seconds that this process's threads have waited for a core; 0 if not on Linux."""
    waited_ns = 0
    with suppress(OSError):  # another system
        for thread in os.scandir("/proc/self/task"):
            # A thread may have just ended.
            with suppress(OSError, IndexError), open(f"{thread.path}/schedstat") as counts:
                waited_ns += int(counts.read().split()[1])
    return waited_ns / 1e9


def taken_by_others_s() -> float:
    """Return the CPU seconds of unrelated processes on our cores since boot; 0 if unknown."""
    times = os.times()
    own_s = time.process_time() + times.children_user + times.children_system
    try:
        cores, own_s = psutil.cpu_times(percpu=True), own_s + _living_children_s()
        ours = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)]
    except (OSError, AttributeError, psutil.Error):  # not Linux, or an unreadable /proc
        return 0.0
    return sum(sum(core[:3]) + sum(core[5:8]) for core in ours) - own_s  # no idle or iowait time


def _living_children_s() -> float:
    taken_s = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the child has just ended
            taken_s += sum(child.cpu_times()[:4])  # including the child's ended children
    return taken_s


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def are_interrupted(times_s: Sequence[float], waited_s: Sequence[float]) -> list[bool]:
    """Return, for each time, whether other processes may have delayed it by over 1 %."""
    return [waited > SAME * time for time, waited in zip(times_s, waited_s, strict=False)]


def held_up(rows: Sequence[tuple[Sequence[float], Sequence[float]]], rounds: str) -> str:
    """Return a sentence about rounds that other programs delayed; empty if few were delayed.

    A row has the times of one variant and their possible delays, in seconds. `rounds` is the noun
    for the sentence.
    """
    if not any(map(any, (waited_s for _, waited_s in rows))):
        return ""
    interrupted = [any(one) for one in zip_longest(*(are_interrupted(*row) for row in rows))]
    times_s, waited_s = (sum(map(sum, column)) for column in zip(*rows, strict=True))
    share = waited_s / max(times_s, TICK_S)
    if sum(interrupted) <= SELDOM * len(interrupted):
        return ""
    return (
        f"{BUSY}: other programs delayed {sum(interrupted)} of {len(interrupted)} "
        f"{rounds} (by up to {share:.0%} of the time)"
    )
