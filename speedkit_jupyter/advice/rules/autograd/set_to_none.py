"""Gradients that are filled with zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

# What zeros are added to is read and written, which takes up to so many times as long as the zeros.
ADDED = 3.0
ZEROING = ("aten::zero_", "aten::_foreach_zero_", "aten::fill_")


class SetToNone(Rule):
    """`zero_grad(set_to_none=False)`: gradients are written twice, and added."""

    name: ClassVar[str] = "set_to_none"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where an optimizer of the step is told so."""
        if not seen.watched.zeroed_to[False] or not seen.trains:
            return
        trained = [one for one in seen.parameters if one.requires_grad]
        size = sum(one.numel() * one.element_size() for one in trained)
        zeroing = seen.operators(*ZEROING) or seen.share("optimizer") * 0.1
        most = min(zeroing * (1 + ADDED), 0.8)
        yield Opportunity(
            self.name,
            "let gradients go in zero_grad",
            f"zero_grad(set_to_none=False) fills {size / 2**20:.3g} MiB with zeros, to which "
            f"gradients are added: up to {share(most)} of the step",
            Gain(amdahl(zeroing * 0.5, 1e9).low, amdahl(most, 1e9).low),
            "zero_grad(), whose default lets them go",
            "a parameter that gets no gradient is not stepped any more (weight decay and momentum "
            "leave it alone)",
            trial=trials.zeroed_to_none,
        )
