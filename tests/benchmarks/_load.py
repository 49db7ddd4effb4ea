"""Other processes that load the machine."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# They end by themselves if this process is killed.
LONGEST_S = 3600


@contextmanager
def strangers(number: int, code: str = "while True: pass") -> Iterator[None]:
    """Have this many processes run the code during the block.

    A shell that has ended starts them: the time of our own children would count as ours.
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
    """Have two processes multiply matrices in bursts of 0.1 to 1 s with pauses as long."""
    here = str(Path(__file__).parent)
    code = f"import os, sys; sys.path.insert(0, {here!r}); import _load; _load._burst(os.getpid())"
    with strangers(2, code):
        time.sleep(5)  # until they have imported torch
        yield


def _burst(seed: int) -> None:
    torch.set_num_threads(1)
    order, a = random.Random(seed), torch.rand(256, 256)
    while True:
        end = time.perf_counter() + order.uniform(0.1, 1.0)
        while time.perf_counter() < end:
            a @ a
        time.sleep(order.uniform(0.1, 1.0))
