"""Run a workload in several ways, each on its own copy, in interleaved blocks.

    python tests/benchmarks/_side_by_side.py WORKLOAD CONFIG

prints the speed of a workload under a config (JSON), relative to its plain steps. If the config
sets `malloc`, plain steps run in another process, where they can't reuse memory the plan keeps.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from multiprocessing import get_context

from _timing import over, wait
from _workloads import made

from speedkit_jupyter import SpeedConfig
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.torchglue import heap

Call = Callable[[], object]
# Returns a context manager that surrounds each block of a step.
Force = Callable[[], AbstractContextManager[object]]
Forces = Mapping[str, Force]
SECONDS, MOST_ROUNDS, LEAST_ROUNDS = 10.0, 300, 10
# Seconds of a block, and of the untimed steps before it.
BLOCK_S, LEAD_IN_S = 0.02, 0.005
# All steps run FEW_ROUNDS rounds. Then steps over FAR times as slow as the first step are dropped.
FEW_ROUNDS, FAR = 3, 2.0


def planned(name: str, config: SpeedConfig | None, device: str = "cpu") -> tuple[Call, Forces]:
    """Return a fresh workload's step under a plan, and the context that puts the plan in force."""
    work = made(name, device)
    context = prepare(work.model, config, [work.optimizer] if work.optimizer else [])

    def step() -> object:
        with context.autocast():
            return work.run()

    return step, {"tuned": context.in_force}


def interleaved(
    steps: Mapping[str, Call], forces: Forces
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time steps in shuffled rounds; return their seconds by name, and errors of failed steps."""
    usual_s, failed = dict[str, float](), dict[str, str]()
    for name in steps:
        try:
            usual_s[name] = min(_block(steps[name], forces.get(name)) for _ in range(3))
        except Exception as error:
            failed[name] = f"fails: {type(error).__name__}"
    times: dict[str, list[float]] = {name: [] for name in usual_s}
    first, end_s = times[next(iter(steps))], time.perf_counter() + SECONDS
    for number in range(MOST_ROUNDS):
        if time.perf_counter() > end_s and number >= LEAST_ROUNDS:
            break
        some = [name for name in times if number < FEW_ROUNDS or not is_far(first, times[name])]
        for name in random.sample(some, len(some)):
            times[name].append(_block(steps[name], forces.get(name), usual_s[name]))
    return times, failed


def _block(step: Call, force: Force | None, usual_s: float = 1.0) -> float:
    """Return the mean seconds of a step in a block of steps."""
    with force() if force else nullcontext():
        heap.occupy_free_addresses()  # a plan that keeps memory may have been in force before
        for _ in range(1 + int(LEAD_IN_S / usual_s)):
            step()
        wait()
        number, begun_s = 1 + int(BLOCK_S / usual_s), time.perf_counter()
        for _ in range(number):
            step()
        wait()
        return (time.perf_counter() - begun_s) / number


def is_far(first_s: list[float], times_s: list[float]) -> bool:
    """Return whether `times_s` exceed FAR times `first_s` in every round that has both times."""
    return all(FAR * ours < its for ours, its in zip(first_s, times_s, strict=False))


@contextmanager
def elsewhere(name: str) -> Iterator[Call]:
    """Yield a function that runs a workload's plain step in another process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield lambda: process.submit(_run, name).result()


@cache
def _plain(name: str) -> Call:
    return made(name).run


def _run(name: str) -> None:
    _plain(name)()


def in_fresh_process(name: str, config: Mapping[str, object]) -> list[float]:
    """Return a plan's speed relative to plain steps, in a fresh process, as [median, low, high]."""
    command = [sys.executable, __file__, name, json.dumps(config)]
    found = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    return list(json.loads(found.splitlines()[-1]))


def main(name: str, config: str) -> None:
    wanted = SpeedConfig.from_dict(json.loads(config))
    step, forces = planned(name, wanted)
    if wanted.malloc is True:
        with elsewhere(name) as plain, forces["tuned"]():
            times, _ = interleaved({"baseline": plain, "tuned": step}, {})
    else:
        times, _ = interleaved({"baseline": made(name).run, "tuned": step}, forces)
    print(json.dumps(over(times["baseline"], times["tuned"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
