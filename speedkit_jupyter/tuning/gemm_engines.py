"""The engines of float32 products, measured once for a machine: else one would never be tried."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.tuning.outcome import Tuning

# Not for less than so many seconds of budget. It takes two seconds, and at most this share of it.
LEAST_S, SHARE = 12.0, 0.25
# What took less goes without saying.
NOTICED_S = 0.5


def measure(tuning: Tuning, budget: Budget) -> Iterator[Progress]:
    """Where they are not known; what is tuned for has them then. The budget does not count it."""
    is_known = tuning.facts.device_type != "cpu" or tuning.hardware.cpu.gemm is not None
    if is_known or tuning.hardware.pinned or budget.seconds < LEAST_S:
        return
    yield Progress(budget.share, "measuring the engines of float32 products, once")
    begun_s = clock.now()
    tuning.hardware = tuning.hardware.with_gemm(SHARE * budget.seconds)
    took_s = clock.now() - begun_s
    budget.exclude(took_s)
    rates = tuning.hardware.cpu.gemm
    if rates is not None and rates.failure:
        tuning.notes.append(f"gemm was not tried: {rates.failure}")
    elif took_s > NOTICED_S:  # it was not known already
        tuning.notes.append(
            f"It took {took_s:.1f} s more to measure the engines of float32 products, which is "
            "done once for this machine"
        )
