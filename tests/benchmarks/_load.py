"""Other processes that load the machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
