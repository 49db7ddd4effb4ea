"""Anomaly detection that was left on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.words import share

# Seconds for each operator that gradients are computed of: its traceback and the look for NaN.
# (Measured with torch 2.13: 25 to 90 µs; the look goes over all numbers, too.)
EACH_S = (1e-5, 1e-4)


class AnomalyMode(Rule):
    """`torch.autograd.set_detect_anomaly(True)`: a traceback for each operator, a look at each
    gradient.
    """

    name: ClassVar[str] = "anomaly_mode"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where it is on while models are called."""
        if "anomaly" not in seen.watched.flags or not seen.trains:
            return
        most = seen.computing
        operators = max(seen.operator_calls() / 2, 1.0)
        extra = [min(operators * one / seen.step_s, most * 0.9) for one in EACH_S]
        yield Opportunity(
            self.name,
            "turn anomaly detection off",
            f"it is on: each of some {operators:.0f} operators notes its traceback, and each "
            f"gradient is looked through for NaN; forward and backward: {share(most)} of the step",
            Gain(amdahl(min(extra[0], 0.2), 1e9).low, amdahl(max(extra[1], 0.3 * most), 1e9).low),
            "torch.autograd.set_detect_anomaly(False)",
            "a NaN is no longer traced to where it came from",
            trial=_off,
        )


@contextmanager
def _off(_: Subject) -> Iterator[None]:
    """Also where the step itself turns it on."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda mode, check_nan=True: original(False, check_nan)

    with torch.autograd.set_detect_anomaly(False), patched(torch, "set_anomaly_enabled", make):
        yield
