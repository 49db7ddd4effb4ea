"""Load the machine with other processes, and repeat trials while they run."""

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from _program import Row, append, read

# The other processes end after this time by themselves, even if this process is killed.
LONGEST_S = 3600


@contextmanager
def strangers(number: int, code: str = "while True: pass") -> Iterator[None]:
    """Run `code` in `number` processes during the block.

    A shell starts them and exits, because SpeedKit counts CPU time of child processes as its own.
    """
    code = f"import signal; signal.alarm({LONGEST_S})\n{code}"
    start = f"{shlex.join([sys.executable, '-c', code])} >/dev/null 2>&1 & echo $!"
    command = ["sh", "-c", "\n".join([start] * number)]
    started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield
    finally:
        for one in started.stdout.split():
            os.kill(int(one), signal.SIGKILL)


@contextmanager
def bursts() -> Iterator[None]:
    """Run two processes that alternately multiply matrices and pause, each for 0.1 to 1 s."""
    here = str(Path(__file__).parent)
    code = f"import os, sys; sys.path.insert(0, {here!r}); import _load; _load._burst(os.getpid())"
    with strangers(2, code):
        time.sleep(5)  # until they have imported torch
        yield


def repeated(options: argparse.Namespace, number: int, trial: Callable[[int], Row]) -> list[Row]:
    """Run the trials that the file lacks, unless `--table`; return all rows of this load."""

    def done() -> list[Row]:
        return [row for row in read(options.file) if row["load"] == options.load]

    torch.set_num_threads(1)  # two threads that wait for one another would measure the scheduler
    if not options.table:
        with bursts() if options.load == "busy" else nullcontext():
            for at in range(len(done()), number):
                append(options.file, {"load": options.load, **trial(at)})
    return done()


def share(said: Sequence[bool]) -> str:
    """Return the share of true values as `3.0% [0.6, 8.5]`, with its Clopper-Pearson interval."""
    low, high = _interval(said)
    return f"{sum(said) / len(said):.1%} [{100 * low:.1f}, {100 * high:.1f}]"


def is_above(said: Sequence[bool], most: float) -> bool:
    """Return whether the whole interval of the share is above `most`."""
    return bool(said) and _interval(said)[0] > most


def _interval(said: Sequence[bool]) -> tuple[float, float]:
    from scipy.stats import binomtest

    found = binomtest(sum(said), len(said)).proportion_ci()
    return float(found.low), float(found.high)


def _burst(seed: int) -> None:
    torch.set_num_threads(1)
    order, a = random.Random(seed), torch.rand(256, 256)
    while True:
        end = time.perf_counter() + order.uniform(0.1, 1.0)
        while time.perf_counter() < end:
            a @ a
        time.sleep(order.uniform(0.1, 1.0))
