"""Gradients that are filled with zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.measure.checks import roofline
from speedkit_jupyter.support.words import share

# Zeros are written; what is added to them is read, and read again, and written: in bytes of a
# parameter, in memory at the least and at the most. An operator of its own for each takes as long.
PASSES, EACH_S = (1.0, 5.0), 8e-6


class SetToNone(Rule):
    """`zero_grad(set_to_none=False)`: gradients are written twice, and added."""

    name: ClassVar[str] = "set_to_none"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where an optimizer of the step is told so."""
        import torch

        if not seen.watched.zeroed_to[False] or not seen.trains:
            return
        trained = [one for one in seen.parameters if one.requires_grad]
        size = sum(one.numel() * one.element_size() for one in trained)
        rate = roofline.peak(seen.device, torch.float32, "fp32").bytes_per_s
        most = (PASSES[1] * size / rate + len(trained) * EACH_S) / seen.step_s
        least = PASSES[0] * size / rate / seen.step_s
        yield Opportunity(
            self.name,
            "let gradients go in zero_grad",
            f"zero_grad(set_to_none=False) fills {size / 2**20:.3g} MiB with zeros in each step, "
            f"to which gradients are added; optimizer: {share(seen.share('optimizer'))} of it",
            Gain(amdahl(min(least, 0.5), 1e9).low, amdahl(min(most, 0.8), 1e9).low),
            "zero_grad(), whose default lets them go",
            "a parameter that gets no gradient is not stepped any more (weight decay and momentum "
            "leave it alone)",
            trial=trials.zeroed_to_none,
        )
