"""float64 where nobody asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.1
# Twice the bytes (which may leave a cache) and half the numbers in a vector; on most GPUs a 32nd of
# the rate.
ON_CPU, ON_GPU = (1.25, 3.0), (1.5, 20.0)


class DoublePrecision(Rule):
    """Models that compute in float64."""

    name: ClassVar[str] = "double_precision"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """All models whose parameters are double."""
        import torch

        computing = seen.share("forward", "backward", "optimizer")
        calls = seen.watched.of_models()
        double = [
            call.module
            for call in calls
            if any(one.dtype == torch.float64 for one in call.module.parameters())
        ]
        if not double or computing < LEAST:
            return
        called = seen.name(double[0], "the model")
        yield Opportunity(
            self.name,
            f"compute in float32: {called} is in float64",
            f"{called}'s parameters are float64; forward, backward and optimizer: "
            f"{share(computing)} of the step",
            amdahl(computing, *(ON_CPU if seen.on_cpu else ON_GPU)),
            f"{called}.float(), and x.float() (NumPy's numbers are float64)",
            "7 digits in place of 16; an optimizer that has begun is made anew",
        )
