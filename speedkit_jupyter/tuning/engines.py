"""What a search measures first: the engines of float32 products."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.tuning.outcome import Tuning

# The engines of float32 products are not measured for less than so many seconds of budget; that
# takes two seconds, and at most this share of it. What took less than this goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 12.0, 0.25, 0.5


def measure(tuning: Tuning, budget: Budget) -> Iterator[Progress]:
    """Measure what the candidates depend on, and write it into the search's hardware."""
    is_known = tuning.facts.device_type != "cpu" or tuning.hardware.cpu.gemm is not None
    if is_known or tuning.hardware.pinned or budget.seconds < ENGINES_S:
        return
    yield Progress(budget.share, "measuring the engines of float32 products, once")
    _measure_products(tuning, budget)


def _measure_products(tuning: Tuning, budget: Budget) -> None:
    """Beside the budget, since it is done once for a machine."""
    begun_s = clock.now()
    tuning.hardware = tuning.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
    took_s, rates = clock.now() - begun_s, tuning.hardware.cpu.gemm
    budget.exclude(took_s)
    if rates is not None and rates.failure:
        tuning.notes.append(f"gemm was not tried: {rates.failure}")
    elif took_s > NOTICED_S:  # it was not known already
        tuning.notes.append(
            f"It took {took_s:.1f} s more to measure the engines of float32 products, which is "
            "done once for this machine"
        )
