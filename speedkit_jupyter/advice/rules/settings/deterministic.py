"""Deterministic kernels that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.words import share

# Memory that is filled before it is written, sums in one order; cuDNN without its fastest kernels.
ON_CPU, ON_GPU = (1.0, 1.25), (1.02, 1.4)


class Deterministic(Rule):
    """`use_deterministic_algorithms(True)`; on CUDA `cudnn.deterministic`, too."""

    name: ClassVar[str] = "deterministic"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where it is on while models are called."""
        flags = seen.watched.flags
        named = "deterministic" in flags
        if not named and not (seen.device.type == "cuda" and "cudnn.deterministic" in flags):
            return
        computing = seen.computing
        yield Opportunity(
            self.name,
            "allow kernels whose sums come in any order",
            f"deterministic algorithms are asked for; forward and backward: {share(computing)} of "
            "the step",
            amdahl(computing, *(ON_CPU if seen.on_cpu else ON_GPU)),
            "torch.use_deterministic_algorithms(False), torch.backends.cudnn.deterministic = False",
            "two runs differ by rounding",
            trial=_off,
        )


@contextmanager
def _off(_: Subject) -> Iterator[None]:
    import torch

    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
    )
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic = False
    try:
        with patched(torch, "use_deterministic_algorithms", _ignored):  # the step's own calls
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic = before[2]


def _ignored(_: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **kwargs: None
