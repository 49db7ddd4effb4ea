"""How fast each engine multiplies float32 matrices here, and from which size on oneDNN is ahead.

Measured once for each processor, number of threads and version of torch, and kept in the
database: in a process of its own, since on some virtual machines oneDNN dies of a signal
(pytorch#89817, pytorch#177227), and a kernel must not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from itertools import takewhile

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import ONEDNN_LINEAR

# Importing torch takes most of it; a machine that is busy takes longer.
PATIENCE_S = 60.0
# What holds an engine's instructions back, or lets it use more: rates belong to their values.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE", "LD_PRELOAD",
)  # fmt: skip
# Sides of square matrices; all of them take some 100 ms. Not only powers of two: an engine may
# stumble over just those, whose rows lie on top of one another in the cache (oneDNN without FMA:
# 130 GFLOP/s at 384 and 70 at 512).
SIZES = (64, 96, 128, 160, 192, 256, 384, 512)
PRODUCTS = 3  # of each size
# oneDNN is given a product that it was faster at by so much: its kernel costs a few microseconds.
AHEAD = 1.1
UNMEASURED, BUSY = "the engines could not be measured", "the machine is busy"
SCRIPT = f"""
import json, sys, time, torch
threads, sizes = json.loads(sys.argv[1])
torch.set_num_threads(threads)
linear = {ONEDNN_LINEAR}
def best(call):
    call()
    shortest, end = 1e9, time.perf_counter() + 0.003
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
rows = []
with torch.inference_mode():
    for _ in range(2):
        for size in sizes:
            a = torch.ones(size, size)  # as in training: forward, gradients of inputs and weights
            pairs = (a, a.mT), (a, a), (a.mT, a)
            blas = best(lambda: [torch.mm(*pair) for pair in pairs])
            onednn = best(lambda: [linear(a, b.t(), None, "none", [], "") for a, b in pairs])
            rows.append([size, blas, onednn])
print(json.dumps(rows))
"""


class GemmRates(BaseModel):
    """Operations per second of float32 products by each engine, at the size that it is fastest at;
    from `least` multiply-adds on oneDNN was faster (0: at no size that was tried). `failure` says
    why there is nothing to go by.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    blas: NonNegativeFloat = 0.0
    onednn: NonNegativeFloat = 0.0
    least: NonNegativeInt = 0
    failure: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast as the BLAS oneDNN is; 0 where that is not known."""
        return self.onednn / self.blas if self.blas else 0.0


def known(machine: str) -> GemmRates | None:
    """Return what was measured on this machine before; None where nothing was, or can be read."""
    with suppress(SpeedKitError, ValidationError):  # whoever writes there next says what is wrong
        if (rates := database.newest("rates", machine)) is not None:
            return GemmRates.model_validate(rates)
    return None


def measured(machine: str, threads: int, patience_s: float = PATIENCE_S) -> GemmRates:
    """Return what is known, or else what a process of its own finds now (about 2 s); it is kept.

    Never raises: what goes wrong, and that it took longer than `patience_s` seconds, is the
    `failure`. A busy machine is asked again.
    """
    rates = known(machine)
    if rates is None:
        rates = _measure(threads, patience_s)
        if BUSY not in rates.failure:
            with suppress(SpeedKitError):  # measured anew the next time
                database.keep("rates", machine, "", rates.model_dump())
    return rates


def _measure(threads: int, patience_s: float) -> GemmRates:
    command = [sys.executable, "-c", SCRIPT, json.dumps([threads, SIZES])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        return GemmRates(failure=f"{UNMEASURED} within {patience_s:.2g} s: {BUSY}")
    except (OSError, subprocess.SubprocessError) as error:
        return GemmRates(failure=f"{UNMEASURED}: {type(error).__name__}: {BUSY}")
    if done.returncode < 0:
        return GemmRates(failure=f"oneDNN ended its process with signal {-done.returncode}")
    if done.returncode:
        return GemmRates(failure=(done.stderr.strip().splitlines() or [UNMEASURED])[-1])
    return _rates(json.loads(done.stdout))


def _rates(rows: list[tuple[int, float, float]]) -> GemmRates:
    """Return rates from rows of size and seconds of BLAS and of oneDNN.

    They hold all sizes twice, each time the smallest first; the faster counts.
    """
    both = zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
    best = [(size, min(a, c), min(b, d)) for (size, a, b), (_, c, d) in both]
    rates = [[PRODUCTS * 2 * size**3 / s for s in seconds] for size, *seconds in best]
    blas, onednn = map(max, zip(*rates, strict=True))
    ahead = [size for size, *_ in takewhile(lambda row: row[1] >= AHEAD * row[2], reversed(best))]
    return GemmRates(blas=blas, onednn=onednn, least=ahead[-1] ** 3 if ahead else 0)
